"""Paths of state files as servers name them."""

import os

import torch

from deft_backend.telemetry.counters import Place, StateName
from deft_backend.telemetry.shown_batch import Batch


def state_path(folder, port=1, tp=0, pp=None, dp=None, pid=None, place=None):
    """The path in a cache folder's `servers`, or in any other folder, which is made."""
    name = StateName(port, tp, pp, dp, place or Place.here(), pid or os.getpid())
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name.file_name


def batch_of(forest):
    """A batch whose page tables hold a forest, in pages of one token, as a host keeps it."""
    table = torch.zeros((forest.batch_size, int(forest.seq_lens.max())), dtype=torch.int32)
    columns = (forest.start, forest.end, forest.query_begin, forest.query_end)
    for node, (start, end, begin, stop) in enumerate(zip(*columns, strict=True)):
        pages = 1 + node * 10_000 + torch.arange(start, end)
        for request in forest.order[begin:stop]:
            table[int(request), start:end] = pages
    return Batch(table, torch.tensor(forest.seq_lens.tolist()), 1)
