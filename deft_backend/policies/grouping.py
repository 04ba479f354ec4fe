"""A policy's output: groups of KV ranges with the queries that read them together, and its cost."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deft_backend.costs.cost_model import SMALLEST_MS, FloatArray
from deft_backend.forest import Int32Array
from deft_backend.policies.target import PolicyError, Target

Int64Array = npt.NDArray[np.int64]


def concatenated_ranges(
    begin: npt.NDArray[np.integer], count: npt.NDArray[np.integer]
) -> npt.NDArray[np.int64]:
    """``begin[0], begin[0] + 1, …`` (``count[0]`` numbers), then likewise for each other
    element."""
    count = count.astype(np.int64)
    shift = begin - np.cumsum(count) + count
    numbers: npt.NDArray[np.int64] = np.arange(int(count.sum())) + np.repeat(shift, count)
    return numbers


@dataclass(frozen=True, eq=False)
class Grouping:
    """Groups of KV and queries, the output of a policy: ``G`` groups, ``S`` segments; NumPy arrays.

    The kernels load a group's KV once for all of its queries (KV-guided grouping, DeFT section
    3.3): one range, or several that follow one another in the depth-first flattened forest. A
    group's queries are in forest order, so those that attend to a range are a run of them. Two
    integers therefore replace DeFT's bit causal mask (Remark 3.1).
    """

    query_ptr: Int32Array
    """[G + 1]: queries of group ``g`` are ``queries[query_ptr[g] : query_ptr[g + 1]]``."""
    queries: Int32Array  # request indices
    segment_ptr: Int32Array  # [G + 1]: segments of group ``g``
    request: Int32Array
    start: Int32Array
    end: Int32Array
    """[S]: each segment's tokens: positions ``start … end - 1`` of a request's context."""
    open: npt.NDArray[np.bool_]  # [S]: whether the segment ends where its request currently ends
    attend_begin: Int32Array
    attend_end: Int32Array  # [S]: the run of the group's queries that attend to each segment
    least_shape: npt.NDArray[np.integer] | None = None
    """[G]: the least number of each group's tile shape (`ORDERED` is the last); None: any."""

    @property
    def num_groups(self) -> int:
        return len(self.query_ptr) - 1

    @property
    def several_ranges(self) -> npt.NDArray[np.bool_]:
        """[G] whether a group has several segments, or a query that skips a segment."""
        several: npt.NDArray[np.bool_] = np.diff(self.segment_ptr) != 1
        owner = np.repeat(np.arange(self.num_groups), np.diff(self.segment_ptr))
        partly = (self.attend_begin > 0) | (self.attend_end < self.num_queries()[owner])
        several[owner[partly]] = True
        return several

    def num_queries(self) -> Int32Array:
        """[G] queries of each group."""
        return self.query_ptr[1:] - self.query_ptr[:-1]

    def num_tokens(self) -> npt.NDArray[np.int64]:
        """[G] KV tokens of each group when the forest was built."""
        length = (self.end - self.start).astype(np.int64)
        total: npt.NDArray[np.int64] = np.concatenate(([0], np.cumsum(length)))
        tokens: npt.NDArray[np.int64] = total[self.segment_ptr[1:]] - total[self.segment_ptr[:-1]]
        return tokens


def longest_first(cost_ms: FloatArray, num_programs: int) -> float:
    """FlashForge's equation 3 if each subtask, longest first, goes to the first free thread
    block.
    """
    if num_programs < 1:
        raise PolicyError(f"num_programs is {num_programs}; expected at least 1 thread block")
    costs = np.sort(cost_ms)[::-1].tolist()
    busy = costs[:num_programs]
    heapq.heapify(busy)
    for cost in costs[num_programs:]:
        heapq.heapreplace(busy, busy[0] + cost)
    return max(busy, default=0.0)


def partial_result_bytes(num_query_heads: int, head_dim: int, dtype_bytes: int) -> int:
    """Bytes of one query's partial result, for one layer: of each head, an output divided by its
    largest element, in 16 bits (32 for float32), that element and the log-sum-exp.
    """
    return num_query_heads * (head_dim * (4 if dtype_bytes == 4 else 2) + 8)


def kv_bytes(tokens: int, target: Target) -> int:
    """Bytes of `tokens` tokens of keys and values, all KV heads, for one layer."""
    return 2 * target.head_dim * target.dtype_bytes * target.num_kv_heads * tokens


def estimated_ms(grouping: Grouping, target: Target) -> float:
    """Expected time of both stages of one layer.

    Stage 1 takes the time of its launch plus the makespan of its items or the time of its KV loads
    at the GPU's bandwidth, whichever is longer. Stage 2 writes partial results and reads them back.
    """
    model = target.costs
    # Each query tile of a group is an item, masked ones if the group needs spans.
    queries, tokens = grouping.num_queries().astype(np.int64), grouping.num_tokens()
    held = np.where(grouping.several_ranges, target.tile_queries[-1], target.largest_tile)
    tiles = -(-queries // np.maximum(1, held))
    cost = model.time(-(-queries // tiles) * target.query_vectors, tokens)
    cost = np.maximum(np.repeat(cost, tiles) - model.launch_ms, SMALLEST_MS)
    each = partial_result_bytes(target.num_query_heads, target.head_dim, target.dtype_bytes)
    parts = np.bincount(grouping.queries)  # groups of each query; a query in one merges nothing
    merged = int(parts[parts > 1].sum()) * each * target.query_tokens
    other = model.launch_ms + model.transfer_ms(2 * merged)
    loads = model.transfer_ms(kv_bytes(int(tiles @ tokens), target))
    return max(longest_first(cost, target.num_programs), loads) + other
