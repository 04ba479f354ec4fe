"""`deft tune`: measure the cost table of one head shape on this machine's GPU. Costs are fitted to
launches, then varied one at a time as long as whole batches get faster plans."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import numpy.typing as npt
import torch

from deft_backend.costs import CostModel
from deft_backend.costs.cost_model import FloatArray, TileCosts
from deft_backend.costs.tables import TableKey
from deft_backend.files.provenance import provenance
from deft_backend.policies import Target
from deft_backend.shapes import TILE_NAMES, AttentionShape
from deft_backend.tools.tuning.launch_clock import Budget, captured, launch_us, measure_ceilings
from deft_backend.tools.tuning.machine import Launch, Machine, Trials, Work

_BUDGET = Budget(launch_ms=20)


SMALLEST_NS = 1e-3  # least cost in nanoseconds: no fit may give 0

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


@dataclass(frozen=True)
class Grid:
    # Items of each tile shape: KV lengths, and items of a program.
    tile_tokens: tuple[int, ...] = (64, 256, 1024, 4096)
    tile_rounds: tuple[int, ...] = (1, 2, 4)
    # Partial results: the approximate number in a launch, and those of each query.
    result_counts: tuple[int, ...] = (64, 512, 2048, 8192)
    result_parts: tuple[int, ...] = (2, 8)
    # Whole batches that two tables are compared on: nodes a level, then tokens of each node.
    trials: tuple[str, ...] = UNSHARED + SHARED


FACTORS = (0.5, 0.7, 1.45, 2.0)  # each cost is tried at these multiples of its present value

LEAST_GAIN = 0.001  # A change that gains less than this share of the time may be noise


@dataclass(frozen=True, eq=False)
class SearchResult:
    model: CostModel
    ratio: float  # Geometric mean of the times over those of the first start; at most 1
    start: int  # Index of the start that the best costs come from
    plans: int  # Different plans that were measured
    batches: int  # Batches that each table was compared on


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


def search(trials: Trials, starts: Sequence[CostModel]) -> SearchResult:
    """The costs with the shortest times, from the best of `starts` on, one cost at a time. The
    first start stays unless plans are faster by :data:`LEAST_GAIN` in the geometric mean.
    """
    before = trials.times_us(starts[0])

    def ratio_of(model: CostModel) -> float:
        return mean_ratio(trials.times_us(model), before)

    best, ratio, start = starts[0], 1.0, 0
    for index, model in enumerate(starts):
        measured = ratio_of(model)
        if measured < ratio - LEAST_GAIN:
            best, ratio, start = model, measured, index
    improved = True
    while improved:
        improved = False
        for model in _neighbours(best):
            measured = ratio_of(model)
            if measured < ratio - LEAST_GAIN:
                best, ratio, improved = model, measured, True
    return SearchResult(best, ratio, start, trials.plans, len(trials.names))


def _neighbours(model: CostModel) -> Iterator[CostModel]:
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


def used_shapes(target: Target) -> dict[int, int]:
    """Queries of a typical group for each tile shape of one range that some plan uses."""
    used = [shape for shape, held in enumerate(target.single_range_tiles) if held > 0]
    return {s: 1 if s == used[0] else target.single_range_tiles[s] for s in used}


def measure_tile_costs(
    time_us: Callable[[Work], float], target: Target, grid: Grid
) -> tuple[TileCosts, dict[str, float]]:
    """Measure and fit; also return the fits' errors (relative, root of the mean square).

    - Items: ``k`` groups a program, of ``n`` tokens each, take ``launch + k (item + n token)``.
      Their KV stays in the L2 cache; the cost of memory is counted separately, by its bandwidth.
    - Partial results: the same items once whole contexts, once chunks of contexts. The launch of
      chunks takes ``reduce + results · partial`` more.
    """
    fitted, errors = {}, {}
    features: list[tuple[float, ...]]
    for shape, queries in used_shapes(target).items():
        programs = target.tile_programs[shape]
        features, times = [], []
        for tokens in grid.tile_tokens:
            for rounds in grid.tile_rounds:
                work = Work(rounds * programs, queries, tokens, resident=True)
                features.append((1.0, rounds, rounds * tokens))
                times.append(time_us(work) * 1e3)
        (_, item, token), errors[TILE_NAMES[shape]] = fit(features, times)
        fitted[shape] = (_positive(item), _positive(token))
    # An unused shape needs values, but nothing reads them.
    shapes = [fitted.get(shape, fitted[min(fitted)]) for shape in range(max(fitted) + 1)]

    features, more, scale = [], [], []
    for whole, parts in result_works(target, grid):
        alone, together = time_us(whole) * 1e3, time_us(parts) * 1e3
        features.append((1.0, parts.results))
        more.append(together - alone)
        scale.append(together)
    (reduce, partial), errors["partial results"] = fit(features, more, scale)
    item_ns, token_ns = zip(*shapes, strict=True)
    costs = TileCosts(item_ns, token_ns, _positive(partial), _positive(reduce))
    return costs, errors


def result_works(target: Target, grid: Grid) -> list[tuple[Work, Work]]:
    step = max(grid.result_parts)
    works: dict[Work, Work] = {}
    typical = list(used_shapes(target).values())
    for queries in (typical[0], typical[-1]):
        for count in grid.result_counts:
            groups = max(step, count // queries // step * step)
            for parts in grid.result_parts:
                work = Work(groups, queries, target.block_tokens, parts, resident=True)
                works[work] = Work(groups, queries, target.block_tokens, resident=True)
    return [(whole, parts) for parts, whole in works.items()]


def _positive(value: float) -> float:
    return max(SMALLEST_NS, float(f"{value:.4g}"))


def fit(
    features: npt.ArrayLike, times: npt.ArrayLike, scale: npt.ArrayLike | None = None
) -> tuple[FloatArray, float]:
    """Coefficients of 0 or more that bring ``features @ coefficients`` closest to `times`.

    The fit weighs relative errors: a launch of 10 µs counts as much as one of 1 ms.

    - `features` [M, N], `times` [M]
    - `scale` [M] above 0: what errors are relative to; default: `times`

    Returns the coefficients [N] float64, 0 for a term that the measurements contradict, and the
    root of the mean squared relative error.
    """
    of = np.asarray(times if scale is None else scale, dtype=np.float64)
    matrix = np.asarray(features, dtype=np.float64) / of[:, None]
    return _non_negative(matrix, np.asarray(times, dtype=np.float64) / of)


def _non_negative(matrix: FloatArray, goal: FloatArray) -> tuple[FloatArray, float]:
    """The best solution without a negative coefficient, over all sets of columns.

    This is the constrained optimum: on its own columns it equals the unconstrained optimum. A few
    columns have few sets.
    """
    size = np.linalg.norm(matrix, axis=0)
    scaled = matrix / np.where(size > 0.0, size, 1.0)
    best: FloatArray = np.zeros(matrix.shape[1])
    least = float(np.linalg.norm(goal))
    for count in range(1, matrix.shape[1] + 1):
        for columns in combinations(range(matrix.shape[1]), count):
            chosen = list(columns)
            solution, *_ = np.linalg.lstsq(scaled[:, chosen], goal, rcond=None)
            error = float(np.linalg.norm(scaled[:, chosen] @ solution - goal))
            if (solution >= 0.0).all() and error < least * (1.0 - 1e-9):
                least = error
                best = np.zeros(matrix.shape[1])
                best[chosen] = solution
    coefficients: FloatArray = best / np.where(size > 0.0, size, 1.0)
    return coefficients, least / float(np.sqrt(len(goal)))
