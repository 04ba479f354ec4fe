"""`deft tune`: measure the cost table of one head shape on this machine's GPU."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from deft_backend.costs import CostModel
from deft_backend.costs.tables import TableKey
from deft_backend.files.provenance import provenance
from deft_backend.shapes import AttentionShape
from deft_backend.tools.tuning.launch_clock import Budget, captured, launch_us, measure_ceilings
from deft_backend.tools.tuning.machine import Launch, Machine, Work
from deft_backend.tools.tuning.search import SearchResult, Trials, search
from deft_backend.tools.tuning.tile_fit import Grid, measure_tile_costs, used_shapes

_BUDGET = Budget(launch_ms=20)


@dataclass(frozen=True, eq=False)
class Tuned:
    model: CostModel
    errors: dict[str, float]  # Relative error of each fit
    seconds: dict[str, float]  # time of each part
    best: SearchResult  # how the plans of the table compare with those of the table before


def gpu_clock(launch: Launch) -> float:
    """Median microseconds of a launch in a CUDA graph, with the L2 cache flushed before it."""
    replay, _ = captured(launch)
    return launch_us(replay, _BUDGET)


def tune(key: TableKey, before: CostModel, say: Callable[[str], None]) -> Tuned:
    """Measure the table of `key` on the current CUDA device; costs stay that make plans as fast."""
    kv_dtype: torch.dtype = getattr(torch, key.dtype)
    # The time does not depend on which 16 bits the queries have.
    dtype = torch.bfloat16 if kv_dtype.itemsize == 1 else kv_dtype
    device = torch.device("cuda", torch.cuda.current_device())
    shape = AttentionShape(
        key.query_heads, key.kv_heads, key.head_dim, dtype, kv_dtype, device, key.page_size
    )
    machine = Machine(shape, gpu_clock)
    return measure(machine, key, before, Grid(), lambda: measure_ceilings(dtype).read_gb_s, say)


def measure(
    machine: Machine,
    key: TableKey,
    before: CostModel,
    grid: Grid,
    bandwidth_gb_s: Callable[[], float],
    say: Callable[[str], None],
) -> Tuned:
    seconds: dict[str, float] = {}
    target, time_us = machine.target, machine.time_us

    @contextmanager
    def part(title: str) -> Iterator[None]:
        say(title)
        began = time.perf_counter()
        yield
        seconds[title] = time.perf_counter() - began

    with part("compiling the kernels"):
        for work in every_variant(machine, grid):
            machine.launch(work)()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with part("memory bandwidth"):
        bandwidth = bandwidth_gb_s()
    with part("items of each tile shape, and partial results"):
        tiles, errors = measure_tile_costs(time_us, target, grid)
    # Costs that only the papers' policies read stay those of the table in use.
    kept = replace(before, source=source_of(key), head_dim=key.head_dim)
    model = replace(kept, bandwidth_gb_s=float(np.round(bandwidth)), tiles=tiles)
    with part("plans of whole batches"):
        best = search(Trials(machine, grid.trials), [kept, model])
    return Tuned(best.model, errors, seconds, best)


def every_variant(machine: Machine, grid: Grid) -> Iterator[Work]:
    """Small launches that compile every kernel variant of the later measurements."""
    for queries in used_shapes(machine.target).values():
        for parts in (1, 2):
            yield Work(2, queries, min(grid.tile_tokens), parts)


def source_of(key: TableKey) -> str:
    origin = provenance()
    return (
        f"deft tune on {origin['device']}, {key.shape}; torch {key.torch}, triton {key.triton}, "
        f"deft-backend {key.package} ({origin['commit']}), {origin['date']}"
    )
