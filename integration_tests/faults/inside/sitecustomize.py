"""Python runs this module at the start of every process of a server under test.

It wraps functions of the package as soon as their modules are loaded. A wrapper acts only while a
file with its fault's name is in the folder ``FAULTS``; each act adds a line to ``<name>.done``.
"""

import functools
import importlib.machinery
import os
import sys
from pathlib import Path

FOLDER = Path(os.environ.get("FAULTS", "/nonexistent"))
FAR = 2**30


def happens(name):
    """Whether a fault is to happen now; it is recorded then."""
    if not (FOLDER / name).exists():
        return False
    with (FOLDER / f"{name}.done").open("a") as file:
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


def _attention(module):
    import torch

    kind = module.TreeAttention
    no_memory = torch.OutOfMemoryError("planted: no memory for the workspace")
    fails(kind, "__init__", "no-memory", no_memory)
    for method in ("plan", "plan_batch"):
        fails(kind, method, "planner", ValueError("planted: the planner fails"))
    run = kind.run

    def poisoned(self, q, k, v, table, lens, **kwargs):
        tensors = (q, k, v, table, lens)
        if not happens("poison"):
            return run(self, *tensors, **kwargs)
        return _poisoned(run, self, tensors, kwargs)

    kind.run = poisoned
    fails(kind, "run", "launch", RuntimeError("planted: a kernel does not start"))


def _poisoned(run, attention, tensors, kwargs):
    """Run with NaN in all KV that no request of the batch may read, and no page ids beyond rows.

    Both are put back afterwards: the KV may belong to other requests.
    """
    import torch

    _, k, v, table, lens = tensors
    size = attention.page_size
    rows = kwargs.get("table_rows")
    rows = torch.arange(len(lens)) if rows is None else rows.long()
    position = torch.arange(table.shape[1] * size)
    caches = [cache.unsqueeze(1) if cache.dim() == 3 else cache for cache in (k, v)]
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
        return run(attention, *tensors, **kwargs)
    finally:
        table.copy_(whole)
        for cache, content in zip(caches, spared, strict=True):
            cache[~used] = content


def _state(module):
    clock = module.time
    fails(module, "write_private", "full-disk", OSError(28, "No space left on device"))

    class Clock:
        """The module `time`, a day in the future or in the past in turns."""

        def __getattr__(self, name):
            return getattr(clock, name)

        def time(self):
            day = 86_400 if int(clock.time()) % 2 else -86_400
            return clock.time() + (day if happens("clock") else 0)

    module.time = Clock()


WRAPPED = {
    "deft_backend.attention.tree_attention": _attention,
    "deft_backend.telemetry.state": _state,
}


class _Finder:
    """Finds the wrapped modules as Python does, and wraps them once they have run."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in WRAPPED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            WRAPPED[name](module)

        spec.loader.exec_module = exec_module
        return spec


if FOLDER.is_dir():
    sys.meta_path.insert(0, _Finder)
