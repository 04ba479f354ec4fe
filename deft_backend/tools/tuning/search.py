"""Finds the costs that `auto` plans best with, by the times of its plans."""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from deft_backend.attention import TreeAttention
from deft_backend.costs import CostModel
from deft_backend.forest import PrefixForest
from deft_backend.planner import Plan
from deft_backend.planner.reference import plan_forest
from deft_backend.tools.traces.tree_forests import forest_from_levels
from deft_backend.tools.tuning.machine import Machine

FACTORS = (0.5, 0.7, 1.45, 2.0)  # each cost is tried at these multiples of its present value

LEAST_GAIN = 0.001  # A change that gains less than this share of the time may be noise


@dataclass(frozen=True, eq=False)
class SearchResult:
    model: CostModel
    ratio: float  # Geometric mean of the times over those of the first start; at most 1
    start: int  # Index of the start that the best costs come from
    plans: int  # Different plans that were measured
    batches: int  # Batches that each table was compared on


@dataclass(frozen=True)
class _Batch:
    forest: PrefixForest
    attention: TreeAttention
    table: torch.Tensor
    lens: torch.Tensor
    q: torch.Tensor
    out: torch.Tensor


class Trials:
    """Times of `auto`'s plans for whole batches, by the cost table that they were made with. Each
    plan runs as in a server's CUDA graph. Equal plans share one measurement, and batches with more
    KV than the machine holds are left out.
    """

    def __init__(self, machine: Machine, descriptions: Sequence[str]) -> None:
        self._machine = machine
        forests = {name: forest_from_levels(name) for name in descriptions}
        self._batches = {
            name: self._batch(forest)
            for name, forest in forests.items()
            if _pages(forest, machine.shape.page_size) <= len(machine.pages)
        }
        self._times: dict[tuple[str, str], float] = {}

    @property
    def names(self) -> list[str]:
        return list(self._batches)

    @property
    def plans(self) -> int:
        return len(self._times)

    def times_us(self, model: CostModel) -> dict[str, float]:
        return {name: self._time(name, batch, model) for name, batch in self._batches.items()}

    def _time(self, name: str, batch: _Batch, model: CostModel) -> float:
        attention, forest = batch.attention, batch.forest
        target = replace(attention.target, cost_model=model)
        plan, _ = plan_forest(forest, attention.policy, target, attention.capacity)
        key = name, _digest(plan)
        if key not in self._times:
            attention.use(plan, forest)
            self._times[key] = self._machine.clock(self._launch(batch))
        return self._times[key]

    def _launch(self, batch: _Batch) -> Callable[[], torch.Tensor]:
        k_cache, v_cache = self._machine.kv
        return lambda: batch.attention.run(
            batch.q, k_cache, v_cache, batch.table, batch.lens, out=batch.out, static_launch=True
        )

    def _batch(self, forest: PrefixForest) -> _Batch:
        machine = self._machine
        table = machine.pages[torch.from_numpy(_page_table(forest, machine.shape.page_size))]
        q = machine.queries(forest.batch_size)
        lens = torch.from_numpy(forest.seq_lens.astype(np.int32)).to(table.device)
        attention = machine.attention(forest.batch_size)
        return _Batch(forest, attention, table, lens, q, torch.empty_like(q))


def mean_ratio(new: dict[str, float], old: dict[str, float]) -> float:
    return math.exp(sum(math.log(new[name] / old[name]) for name in old) / len(old))


def _pages(forest: PrefixForest, page_size: int) -> int:
    return int((-(-forest.length // page_size) + 1).sum())


def _page_table(forest: PrefixForest, page_size: int) -> npt.NDArray[np.int64]:
    """[B, P] int64: pages of each request; nodes that meet in a page: the later one's."""
    width = -(-int(forest.seq_lens.max()) // page_size)
    table = np.zeros((forest.batch_size, width), dtype=np.int64)
    used = 0
    for start, length, begin, end in zip(
        forest.start, forest.length, forest.query_begin, forest.query_end, strict=True
    ):
        first, last = start // page_size, -(-(start + length) // page_size)
        table[forest.order[begin:end], first:last] = np.arange(used, used + last - first)
        used += int(last - first)
    return table


def _digest(plan: Plan) -> str:
    digest = hashlib.sha256()
    for name, value in vars(plan).items():
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()


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
