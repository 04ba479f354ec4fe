"""The expected cost of a grouping: its items' times, their schedule, its partial results."""

import heapq

import numpy as np

from deft_backend.costs.cost_model import SMALLEST_MS, FloatArray
from deft_backend.policies.edges import Int64Array
from deft_backend.policies.errors import PolicyError
from deft_backend.policies.grouping import Grouping
from deft_backend.policies.target import Target


def longest_first(cost_ms: FloatArray, num_programs: int) -> float:
    """The makespan if each subtask, longest first, goes to the first free thread block.

    It is the time of the thread block that takes longest: the objective of FlashForge's equation 3.
    """
    if num_programs < 1:
        raise PolicyError(f"num_programs is {num_programs}; expected at least 1 thread block")
    costs = np.sort(cost_ms)[::-1].tolist()
    busy = costs[:num_programs]
    heapq.heapify(busy)
    for cost in costs[num_programs:]:
        heapq.heapreplace(busy, busy[0] + cost)
    return max(busy, default=0.0)


def group_tiles(grouping: Grouping, target: Target) -> Int64Array:
    """[G] query tiles of each group, each of which loads the group's KV once.

    Groups that need spans have masked tiles.
    """
    queries = grouping.num_queries().astype(np.int64)
    held = np.where(grouping.several_ranges, target.tile_queries[-1], target.largest_tile)
    tiles: Int64Array = -(-queries // np.maximum(1, held))
    return tiles


def item_costs(grouping: Grouping, target: Target) -> tuple[Int64Array, FloatArray]:
    """Group and milliseconds of each item; each query tile of a group is an item."""
    queries = grouping.num_queries()
    tiles = group_tiles(grouping, target)
    query_vectors = -(-queries // tiles) * target.query_vectors
    cost = target.costs.time(query_vectors, grouping.num_tokens())
    return np.repeat(np.arange(grouping.num_groups, dtype=np.int64), tiles), np.repeat(cost, tiles)


def partial_results(grouping: Grouping) -> int:
    """(group, query) pairs whose result stage 2 must merge; a query in one group has none."""
    parts = np.bincount(grouping.queries) if len(grouping.queries) else np.zeros(0, dtype=np.int64)
    return int(parts[parts > 1].sum())


def partial_result_bytes(num_query_heads: int, head_dim: int, dtype_bytes: int) -> int:
    """Bytes of one query's partial result, for one layer.

    Each head has an output, divided by its largest element, in 16 bits (32 bits if the model is in
    float32). It also has two float32 numbers: that element and the log-sum-exp.
    """
    return num_query_heads * (head_dim * (4 if dtype_bytes == 4 else 2) + 8)


def partial_bytes(grouping: Grouping, target: Target) -> int:
    """Bytes of partial results that stage 1 writes at most, for one layer."""
    each = partial_result_bytes(target.num_query_heads, target.head_dim, target.dtype_bytes)
    return partial_results(grouping) * each * target.query_tokens


def kv_bytes(tokens: int, target: Target) -> int:
    """Bytes of `tokens` tokens of keys and values, all KV heads, for one layer."""
    return 2 * target.head_dim * target.dtype_bytes * target.num_kv_heads * tokens


def estimated_ms(grouping: Grouping, target: Target) -> float:
    """Expected time of both stages of one layer.

    Stage 1 takes the time of its launch plus the longer of two times. One is the makespan of its
    items on `target.num_programs` programs. The other is the time of its KV loads at the GPU's
    bandwidth. Stage 2 takes the time to write partial results and to read them back.
    """
    model = target.costs
    group, cost = item_costs(grouping, target)
    cost = np.maximum(cost - model.launch_ms, SMALLEST_MS)
    other = model.launch_ms + model.transfer_ms(2 * partial_bytes(grouping, target))
    loads = model.transfer_ms(kv_bytes(int(grouping.num_tokens()[group].sum()), target))
    return max(longest_first(cost, target.num_programs), loads) + other
