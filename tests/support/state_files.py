"""Paths of state files as servers name them."""

import os

import torch

import strategies
from deft_backend.telemetry.counters import Place, StateName
from deft_backend.telemetry.shown_batch import Batch


def state_path(folder, port=1, tp=0, pp=None, dp=None, pid=None, place=None):
    """The path in a cache folder's `servers`, or in any other folder, which is made."""
    name = StateName(port, tp, pp, dp, place or Place.here(), pid or os.getpid())
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name.file_name


def batch_of(forest):
    """A batch whose page tables hold a forest, in pages of one token, as a host keeps it."""
    made = strategies.batch_of(forest)
    return Batch(torch.from_numpy(made.page_tables), torch.from_numpy(made.seq_lens), 1)
