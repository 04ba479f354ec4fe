"""Python runs this module at the start of every process of a server under test.

It wraps functions of the package as soon as their modules are loaded. A wrapper acts only while a
file with its fault's name is in the folder ``FAULTS``; each act adds a line to ``<name>.done``.
"""

from __future__ import annotations

import importlib.machinery
import os
import sys
import types
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("FAULTS", "/nonexistent"))
FAR = 2**30


def armed(name: str) -> bool:
    """Whether a fault is to happen now."""
    return (FOLDER / name).exists()


def done(name: str) -> None:
    """Record that a fault has happened."""
    with (FOLDER / f"{name}.done").open("a") as file:
        file.write("1\n")


def _attention(module: Any) -> None:
    import torch

    kind = module.TreeAttention
    init, plan, plan_on_device, run = kind.__init__, kind.plan, kind.plan_on_device, kind.run

    def new_init(self: Any, **kwargs: Any) -> None:
        if armed("no-memory"):
            done("no-memory")
            raise torch.OutOfMemoryError("planted: no memory for the workspace")
        if armed("no-compiler"):
            done("no-compiler")
            raise RuntimeError("planted: a kernel does not compile")
        init(self, **kwargs)

    def new_plan(self: Any, *args: Any, **kwargs: Any) -> Any:
        if armed("planner"):
            done("planner")
            raise ValueError("planted: the planner fails")
        return plan(self, *args, **kwargs)

    def new_plan_on_device(self: Any, *args: Any, **kwargs: Any) -> Any:
        if armed("planner"):
            done("planner")
            raise ValueError("planted: the planner fails")
        return plan_on_device(self, *args, **kwargs)

    def new_run(self: Any, q: Any, k: Any, v: Any, table: Any, lens: Any, **kwargs: Any) -> Any:
        if armed("launch"):
            done("launch")
            raise RuntimeError("planted: a kernel does not start")
        if not armed("poison"):
            return run(self, q, k, v, table, lens, **kwargs)
        done("poison")
        return _poisoned(run, self, (q, k, v, table, lens), kwargs)

    kind.__init__, kind.plan, kind.plan_on_device = new_init, new_plan, new_plan_on_device
    kind.run = new_run


def _poisoned(run: Any, attention: Any, tensors: Any, kwargs: Any) -> Any:
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


def _state(module: Any) -> None:
    write, clock = module.write_private, module.time

    def new_write(path: Path, content: str) -> None:
        if armed("full-disk"):
            done("full-disk")
            raise OSError(28, "No space left on device", str(path))
        write(path, content)

    class Clock:
        """The module `time`, a day in the future or in the past in turns."""

        def __getattr__(self, name: str) -> Any:
            return getattr(clock, name)

        def time(self) -> float:
            if not armed("clock"):
                return float(clock.time())
            done("clock")
            return float(clock.time()) + (86_400 if int(clock.time()) % 2 else -86_400)

    module.write_private, module.time = new_write, Clock()


WRAPPED = {
    "deft_backend.attention.tree_attention": _attention,
    "deft_backend.telemetry.state": _state,
}


class _Finder:
    """Finds the wrapped modules as Python does, and wraps them once they have run."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name not in WRAPPED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            WRAPPED[name](module)

        loader.exec_module = exec_module
        return spec


if FOLDER.is_dir():
    sys.meta_path.insert(0, _Finder)
