"""`deft tune`: measure the cost table of one head shape on this machine's GPU. The costs in use are
varied one at a time as long as whole batches get faster plans."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from deft_backend.costs import CostModel
from deft_backend.costs.tables import TableKey
from deft_backend.files.provenance import provenance
from deft_backend.shapes import AttentionShape
from deft_backend.tools.tuning.launch_clock import Budget, captured, launch_us, read_gb_s
from deft_backend.tools.tuning.machine import Launch, Machine, Trials

_BUDGET = Budget(launch_ms=20)

UNSHARED = ("1 1024", "1 8192", "4 32768", "8 8192", "32 2048", "64 2048", "128 512", "256 1024")
"""Batches that share nothing: requests, then tokens of each."""

SHARED = (
    "1,10 4000,400",
    "1,32 4000,1",
    "1,256 4000,1",
    "1,10,10 1000,200,100",
    "1,256 256,32",
    "1,16,64 1024,256,32",
    "1,4,16,512 1024,256,128,32",
    "1,8 120000,512",
    "1,64 16384,64",
    "1,128 4096,64",
    "1,6,48 2000,8000,200",
    "1,16,32,64,128,1024 256,128,64,16,16,16",
    "1,2,4,8,16,32,64,128,1024 16,16,16,16,16,16,16,16,16",
)
"""Trees of the papers and of servers: nodes a level, then tokens of each node."""

FACTORS = (0.5, 0.7, 1.45, 2.0)  # each cost is tried at these multiples of its present value

LEAST_GAIN = 0.001  # A change that gains less than this share of the time may be noise


@dataclass(frozen=True, eq=False)
class Tuned:
    model: CostModel
    ratio: float  # Geometric mean of the times over those of the costs before; at most 1
    plans: int  # Different plans that were measured
    batches: int  # Batches that each table was compared on


def gpu_clock(launch: Launch) -> float:
    """Median microseconds of a launch in a CUDA graph, with the L2 cache flushed before it."""
    replay, _ = captured(launch)
    return launch_us(replay, _BUDGET)


def tune(key: TableKey, before: CostModel, say: Callable[[str], None]) -> Tuned:
    """Search the table of `key` on the current CUDA device; `before` stays if it is as fast."""
    kv_dtype: torch.dtype = getattr(torch, key.dtype)
    # The time does not depend on which 16 bits the queries have.
    dtype = torch.bfloat16 if kv_dtype.itemsize == 1 else kv_dtype
    device = torch.device("cuda", torch.cuda.current_device())
    shape = AttentionShape(
        key.query_heads, key.kv_heads, key.head_dim, dtype, kv_dtype, device, key.page_size
    )
    say("memory bandwidth")
    bandwidth = float(np.round(read_gb_s()))
    # Costs that only the papers' policies read stay those of the table in use.
    kept = replace(before, source=source_of(key), head_dim=key.head_dim)
    say("plans of whole batches")
    trials = Trials(Machine(shape, gpu_clock), UNSHARED + SHARED)
    return search(trials, kept, bandwidth)


def source_of(key: TableKey) -> str:
    origin = provenance()
    return (
        f"deft tune on {origin['device']}, {key.shape}; torch {key.torch}, triton {key.triton}, "
        f"deft-backend {key.package} ({origin['commit']}), {origin['date']}"
    )


def search(trials: Trials, before: CostModel, bandwidth_gb_s: float) -> Tuned:
    """The costs with the shortest times: from `before` on, with its bandwidth or the measured one,
    one cost at a time. They change only if plans are faster by :data:`LEAST_GAIN` in the geometric
    mean.
    """
    times = trials.times_us(before)
    best, ratio, improved = before, 1.0, True
    while improved:
        improved = False
        for model in _neighbours(best, bandwidth_gb_s):
            measured = mean_ratio(trials.times_us(model), times)
            if measured < ratio - LEAST_GAIN:
                best, ratio, improved = model, measured, True
    return Tuned(best, ratio, trials.plans, len(trials.names))


def _neighbours(model: CostModel, bandwidth_gb_s: float) -> Iterator[CostModel]:
    yield replace(model, bandwidth_gb_s=bandwidth_gb_s)
    tiles = model.tiles
    for factor in FACTORS:
        for shape in range(len(tiles.item_ns)):
            item_ns = _scaled(tiles.item_ns, shape, factor)
            yield replace(model, tiles=replace(tiles, item_ns=item_ns))
            token_ns = _scaled(tiles.token_ns, shape, factor)
            yield replace(model, tiles=replace(tiles, token_ns=token_ns))
        yield replace(model, tiles=replace(tiles, partial_ns=tiles.partial_ns * factor))
        yield replace(model, tiles=replace(tiles, reduce_ns=tiles.reduce_ns * factor))


def _scaled(values: tuple[float, ...], at: int, factor: float) -> tuple[float, ...]:
    return (*values[:at], values[at] * factor, *values[at + 1 :])


def mean_ratio(new: dict[str, float], old: dict[str, float]) -> float:
    return math.exp(sum(math.log(new[name] / old[name]) for name in old) / len(old))
