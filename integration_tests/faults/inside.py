"""Faults in every process of a server under test, as a plugin of its host.

It wraps functions of the package. A wrapper acts only while a file with its fault's name is in the
folder ``FAULTS``; each act adds a line to ``<name>.done``.
"""

import functools
import os
import time
from pathlib import Path

import torch

from deft_backend.attention.tree_attention import TreeAttention
from deft_backend.telemetry import state

FAR = 2**30


def happens(name):
    """Whether a fault is to happen now; it is recorded then."""
    folder = Path(os.environ["FAULTS"])
    if not (folder / name).exists():
        return False
    with (folder / f"{name}.done").open("a") as file:
        file.write("1\n")
    return True


def fails(owner, method, fault, error):
    """Let a method raise the error while the fault is armed."""
    real = getattr(owner, method)

    @functools.wraps(real)
    def planted(*args, **kwargs):
        if happens(fault):
            raise error
        return real(*args, **kwargs)

    setattr(owner, method, planted)


def install():
    no_memory = torch.OutOfMemoryError("planted: no memory for the workspace")
    fails(TreeAttention, "__init__", "no-memory", no_memory)
    for method in ("plan", "plan_batch"):
        fails(TreeAttention, method, "planner", ValueError("planted: the planner fails"))
    run = TreeAttention.run

    def poisoned(self, q, k, v, table, lens, **kwargs):
        call = functools.partial(run, self, q, k, v, table, lens, **kwargs)
        if not happens("poison"):
            return call()
        return _poisoned(call, self.page_size, (k, v), table, lens, kwargs.get("table_rows"))

    TreeAttention.run = poisoned
    fails(TreeAttention, "run", "launch", RuntimeError("planted: a kernel does not start"))
    fails(state, "write_private", "full-disk", OSError(28, "No space left on device"))
    state.time = _Clock()


class _Clock:
    """The module `time`, a day in the future or in the past in turns."""

    def __getattr__(self, name):
        return getattr(time, name)

    def time(self):
        day = 86_400 if int(time.time()) % 2 else -86_400
        return time.time() + (day if happens("clock") else 0)


def _poisoned(run, size, caches, table, lens, rows):
    """Run with NaN in all KV that no request of the batch may read, and no page ids beyond rows.

    Both are put back afterwards: the KV may belong to other requests.
    """
    rows = torch.arange(len(lens)) if rows is None else rows.long()
    position = torch.arange(table.shape[1] * size)
    caches = [cache.unsqueeze(1) if cache.dim() == 3 else cache for cache in caches]
    used = torch.zeros(caches[0].shape[0], size, dtype=torch.bool)
    for row, length in zip(rows.tolist(), lens.tolist(), strict=True):
        held = position[: int(length)]
        used[table[row].long()[held // size], held % size] = True
    spared = [cache[~used].clone() for cache in caches]
    whole = table.clone()
    for cache in caches:
        cache[~used] = float("nan")
    for row, length in zip(rows.tolist(), lens.tolist(), strict=True):
        table[row, -(-int(length) // size) :] = FAR
    try:
        return run()
    finally:
        table.copy_(whole)
        for cache, content in zip(caches, spared, strict=True):
            cache[~used] = content
