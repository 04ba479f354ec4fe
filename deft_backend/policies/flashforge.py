"""`flashforge`: profiled costs, bounded division, longest-first scheduling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from deft_backend.costs.cost_model import CostModel, FloatArray
from deft_backend.forest import PrefixForest
from deft_backend.policies.grouping import Grouping
from deft_backend.policies.makespan import item_costs, longest_first
from deft_backend.policies.policy import PolicyError
from deft_backend.policies.splitting import (
    Int64Array,
    KVRanges,
    check_limits,
    cut_evenly,
    node_ranges,
    query_tiles,
    reordered,
)
from deft_backend.policies.target import Target
from deft_backend.settings.policy_names import FLASHFORGE


@dataclass(frozen=True, eq=False)
class Division:
    """The solver's result (FlashForge, section 5.1).

    Attributes
    ----------
    num_chunks : [N] int64
        ``b_k`` of each node: the slices of its KV.
    lower_bound_ms : float
        ``cost_l``: no division and schedule has a smaller makespan.
    makespan_ms : float
        Time of the thread block that takes longest.
    grouping : Grouping
        The slices, longest first.
    """

    num_chunks: Int64Array
    lower_bound_ms: float
    makespan_ms: float
    grouping: Grouping


@dataclass(frozen=True)
class _Tasks:
    """Tasks ``T[i] = (n_q[i], n[i])``, one for each node (FlashForge, section 5.1)."""

    query_vectors: Int64Array
    """``n_q`` of a query tile."""
    tokens: Int64Array
    """``n``"""
    tiles: Int64Array
    """``b_q``: 1, or the number of largest query tiles that the queries fill."""
    blocks: Int64Array
    """Most slices: one for each KV block."""
    cost: FloatArray
    """``C_est(n_q, n)`` of the undivided task."""

    def num_chunks(self, cost_ms: float | FloatArray) -> Int64Array:
        """``b_k <= ceil(C_est / cost_l)`` (equation 5)."""
        wanted = np.ceil(self.cost / cost_ms).astype(np.int64)
        return np.clip(wanted, 1, self.blocks)

    def slice_cost(self, model: CostModel, num_chunks: Int64Array) -> FloatArray:
        """``C[j] = C_est(n_q / b_q, n / b_k)`` (equation 7)."""
        return model.time(self.query_vectors, self.tokens / num_chunks)


@dataclass(frozen=True)
class FlashForge:
    """FlashForge's task division and scheduling (FlashForge, section 5).

    A node and its queries are a task. The policy divides its KV into ``b_k`` slices. It minimises
    the makespan over ``m`` thread blocks, ``max_i sum_j C[j] · A[i, j]`` (equation 3):

    1. Costs come from a profiled table with interpolation, ``C_est(n_q, n)`` (section 5.2).
    2. The makespan is at least the mean over thread blocks (equation 4), and the mean only grows
       with finer division. A binary search finds ``cost_l``, the smallest makespan that no mean
       rules out.
    3. ``b_k[i] <= ceil(C_est(n_q[i], n[i]) / cost_l)`` (equation 5). Queries are divided only if
       they exceed the kernels' largest tile (else ``b_q = 1``).
    4. A grid search compares the divisions within that bound. It keeps the one with the smallest
       makespan of its longest-first schedule.

    Attributes
    ----------
    grid_ratio : float
        Ratio of neighbouring costs in the grid.
    """

    name: ClassVar[str] = FLASHFORGE
    several_segments: ClassVar[bool] = False
    on_device: ClassVar[bool] = False

    grid_ratio: float = 1.25

    def __post_init__(self) -> None:
        if not self.grid_ratio > 1.0:
            raise PolicyError(f"grid_ratio is {self.grid_ratio}; expected a number above 1")

    def group(self, forest: PrefixForest, target: Target) -> Grouping:
        return self.divide(forest, target).grouping

    def divide(self, forest: PrefixForest, target: Target) -> Division:
        """Divide and schedule.

        Raises
        ------
        PolicyError
            If there are more nodes than the target's plan can hold.
        """
        ranges = node_ranges(forest)
        check_limits(self.name, len(ranges.request), len(ranges.queries), target)
        model = target.costs
        tasks = _tasks(ranges, target, model)
        bound = makespan_lower_bound(tasks, model, target.num_programs)
        grid = self._grid(tasks, bound)

        # Order divisions by their own lower bound, so that most need no schedule.
        slice_cost = tasks.slice_cost(model, grid)
        mean = (tasks.tiles * grid * slice_cost).sum(axis=1) / target.num_programs
        at_least = np.maximum(mean, slice_cost.max(axis=1, initial=0.0))
        fits = (grid.sum(axis=1) <= target.max_groups) & (
            grid @ ranges.num_queries <= target.max_group_queries
        )
        best: Division | None = None
        # Of equal makespans, take the coarser division: it leaves fewer partial results.
        for at in np.lexsort((grid.sum(axis=1), at_least)).tolist():
            if not fits[at]:
                continue
            if best is not None and at_least[at] >= best.makespan_ms:
                break
            grouping = cut_evenly(ranges, grid[at], target.block_tokens)
            group_of_item, cost = item_costs(grouping, target)
            schedule = longest_first(cost, target.num_programs)
            if best is None or schedule.makespan_ms < best.makespan_ms:
                first_items = np.unique(group_of_item, return_index=True)[1]
                longest = np.argsort(-cost[first_items], kind="stable")
                best = Division(grid[at], bound, schedule.makespan_ms, reordered(grouping, longest))
        assert best is not None  # the undivided tasks are in the grid and within the limits
        return best

    def _grid(self, tasks: _Tasks, bound: float) -> Int64Array:
        """[K, N] distinct divisions, from equation 5's bound to undivided tasks."""
        highest = max(bound, float(tasks.cost.max(initial=bound)))
        steps = int(np.ceil(np.log(highest / bound) / np.log(self.grid_ratio))) + 1
        costs: FloatArray = bound * self.grid_ratio ** np.arange(steps, dtype=np.float64)
        grid = np.vstack([tasks.num_chunks(costs[:, None]), np.ones_like(tasks.blocks)])
        changes = np.append((np.diff(grid, axis=0) != 0).any(axis=1), True)
        distinct: Int64Array = grid[changes]
        return distinct


def makespan_lower_bound(tasks: _Tasks, model: CostModel, num_programs: int) -> float:
    """``cost_l`` (equation 4) by binary search.

    A schedule of makespan ``c`` cuts task ``i`` into at least ``ceil(C_est / c)`` slices. The mean
    time of its thread blocks is at most ``c``. This mean falls as ``c`` grows. So the smallest
    ``c`` that is no less than the mean is a lower bound.
    """
    low = 0.0
    high = max(
        float(tasks.cost.max(initial=0.0)), float((tasks.tiles * tasks.cost).sum()) / num_programs
    )
    if high == 0.0:
        return 1.0  # an empty batch: any positive cost divides nothing
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        num_chunks = tasks.num_chunks(middle)
        total = float((tasks.tiles * num_chunks * tasks.slice_cost(model, num_chunks)).sum())
        if total / num_programs <= middle:
            high = middle
        else:
            low = middle
    return low if low > 0.0 else high


def _tasks(ranges: KVRanges, target: Target, model: CostModel) -> _Tasks:
    queries, tokens = ranges.num_queries, ranges.tokens
    tiles = query_tiles(queries, target)
    query_vectors = -(-queries // tiles) * target.query_vectors
    blocks = np.maximum(1, -(-tokens // target.block_tokens))
    cost = model.time(query_vectors, tokens)
    return _Tasks(query_vectors, tokens, tiles, blocks, cost)
