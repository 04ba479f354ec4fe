"""Paths of state files as servers name them."""

import os

from deft_backend.telemetry.counters import Place, StateName


def state_path(folder, port=1, tp=0, pp=None, dp=None, pid=None, place=None):
    """The path in a cache folder's `servers`, or in any other folder, which is made."""
    name = StateName(port, tp, pp, dp, place or Place.here(), pid or os.getpid())
    folder.mkdir(parents=True, exist_ok=True)
    return folder / name.file_name
