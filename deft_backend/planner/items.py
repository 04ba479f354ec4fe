"""Groups to work items, compiled: the loops behind :func:`deft_backend.planner.plan_grouping`."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from deft_backend.compile.host_jit import host_jit
from deft_backend.kernel_limits import MAX_MERGED
from deft_backend.planner.encoding import DIRECT, MERGES, OPEN_END, SPAN_SHIFT

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


MOST_TOKENS = (1 << 34) - 1
MOST_ITEMS = 1 << 26
"""What an item's place in the order is made of; items of more tokens count as equally long."""


@host_jit
def _position(shape: int, packed: int) -> int:
    """Where a tile shape comes in ITEM_ORDER."""
    return packed if shape == packed else packed - 1 - shape


@host_jit
def list_items(
    query_ptr: Int32Array,
    segment_ptr: Int32Array,
    start: Int32Array,
    end: Int32Array,
    attend_begin: Int32Array,
    attend_end: Int32Array,
    tile_queries: Int64Array,
    tile_segments: Int64Array,
) -> Int64Array:
    """[I, 6] items in a plan's order: group, first and last query, first and last segment, shape.

    A group with more queries than the largest tile is cut into even tiles; a tile that attends to
    more segments than its shape holds is cut into several items. The segments of an item are those
    of its group, from the first to the last that some query of the tile attends to.
    """
    packed = len(tile_queries) - 1
    largest = 1
    for shape in range(packed):
        largest = max(largest, tile_queries[shape])
    count = 0
    capacity = len(query_ptr) + 16
    items = np.empty((capacity, 6), dtype=np.int64)
    keys = np.empty(capacity, dtype=np.int64)
    for g in range(len(query_ptr) - 1):
        queries = query_ptr[g + 1] - query_ptr[g]
        # One range that every query attends to, or several (or one that some do not)?
        several = segment_ptr[g + 1] - segment_ptr[g] != 1
        if not several:
            s = segment_ptr[g]
            several = attend_begin[s] > 0 or attend_end[s] < queries
        held_queries = tile_queries[packed] if several else largest
        tiles = (queries + held_queries - 1) // held_queries
        for t in range(tiles):
            first = t * queries // tiles
            stop = (t + 1) * queries // tiles
            shape = packed if several else 0
            while tile_queries[shape] < stop - first:
                shape += 1
            s = np.int64(segment_ptr[g])
            while s < segment_ptr[g + 1]:
                held = 0
                tokens = 0
                begin = s
                while s < segment_ptr[g + 1] and held < tile_segments[shape]:
                    if attend_begin[s] < stop and attend_end[s] > first:
                        if held == 0:
                            begin = s
                        held += 1
                        tokens += end[s] - start[s]
                    s += 1
                if held == 0:
                    break
                if count == capacity:
                    capacity *= 2
                    more_items = np.empty((capacity, 6), dtype=np.int64)
                    more_items[:count] = items
                    items = more_items
                    more_keys = np.empty(capacity, dtype=np.int64)
                    more_keys[:count] = keys
                    keys = more_keys
                items[count, 0] = g
                items[count, 1] = first
                items[count, 2] = stop
                items[count, 3] = begin
                items[count, 4] = s
                items[count, 5] = shape
                # Longest first within a shape; ties in the policy's order.
                longest_first = MOST_TOKENS - min(np.int64(tokens), MOST_TOKENS)
                keys[count] = (_position(shape, packed) * (MOST_TOKENS + 1) + longest_first) * (
                    MOST_ITEMS
                ) + count
                count += 1
    # Keys that hold their item's number: numba sorts these faster than it sorts places by keys.
    found = np.empty((count, 6), dtype=np.int64)
    for i, key in enumerate(np.sort(keys[:count])):
        found[i] = items[key % MOST_ITEMS]
    return found


@host_jit
def fill_plan(
    items: Int64Array,
    query_ptr: Int32Array,
    queries: Int32Array,
    row: Int32Array,
    start: Int32Array,
    end: Int32Array,
    is_open: BoolArray,
    attend_begin: Int32Array,
    attend_end: Int32Array,
    batch: int,
    shapes: int,
) -> tuple[
    Int32Array, Int32Array, Int32Array, Int32Array, Int32Array,
    Int32Array, Int32Array, Int32Array, Int32Array, Int32Array, Int32Array, Int32Array,
]:  # fmt: skip
    """The plan's arrays in the order of Plan's fields, and the parts of every query."""
    num_items = len(items)
    num_entries = 0
    num_segments = 0
    tile_ptr = np.zeros(shapes + 1, dtype=np.int32)
    for i in range(num_items):
        num_entries += items[i, 2] - items[i, 1]
        num_segments += items[i, 4] - items[i, 3]
        tile_ptr[_position(items[i, 5], shapes - 1) + 1] += 1
    for t in range(shapes):
        tile_ptr[t + 1] += tile_ptr[t]

    item_segment_ptr = np.zeros(num_items + 1, dtype=np.int32)
    item_query_ptr = np.zeros(num_items + 1, dtype=np.int32)
    segment_row = np.empty(num_segments, dtype=np.int32)
    segment_start = np.empty(num_segments, dtype=np.int32)
    segment_end = np.empty(num_segments, dtype=np.int32)
    segment_span = np.empty(num_segments, dtype=np.int32)
    entry_query = np.empty(num_entries, dtype=np.int32)
    entry_slot = np.empty(num_entries, dtype=np.int32)
    parts = np.zeros(batch, dtype=np.int32)

    s = 0
    e = 0
    for i in range(num_items):
        first = items[i, 1]
        stop = items[i, 2]
        for at in range(items[i, 3], items[i, 4]):
            low = max(np.int64(attend_begin[at]), first) - first
            high = min(np.int64(attend_end[at]), stop) - first
            if low >= high:
                continue
            segment_row[s] = row[at]
            segment_start[s] = start[at]
            segment_end[s] = OPEN_END if is_open[at] else end[at]
            segment_span[s] = low | high << SPAN_SHIFT
            s += 1
        base = query_ptr[items[i, 0]]
        for q in range(base + first, base + stop):
            entry_query[e] = queries[q]
            parts[queries[q]] += 1
            e += 1
        item_segment_ptr[i + 1] = s
        item_query_ptr[i + 1] = e

    # A leaf's item of the smallest tile shape runs in the last launch: it merges its query's other
    # partial results itself, unless one of them comes from the same launch, or they are many.
    merging = np.full(batch, -1, dtype=np.int64)  # the item
    together = np.zeros(batch, dtype=np.int32)  # parts from the last launch
    smallest = _position(0, shapes - 1)
    for i in range(tile_ptr[smallest], tile_ptr[smallest + 1]):
        for e in range(item_query_ptr[i], item_query_ptr[i + 1]):
            together[entry_query[e]] += 1
        if item_query_ptr[i + 1] - item_query_ptr[i] == 1:
            merging[entry_query[item_query_ptr[i]]] = i
        segment_span[i] = 0
    reduced = 0
    for q in range(batch):
        if together[q] != 1 or parts[q] - 1 > MAX_MERGED or parts[q] < 2:
            merging[q] = -1
        if parts[q] > 1 and merging[q] < 0:
            reduced += 1
    reduce_query = np.empty(reduced, dtype=np.int32)
    reduce_ptr = np.zeros(reduced + 1, dtype=np.int32)
    free = np.zeros(batch, dtype=np.int32)
    r = 0
    for q in range(batch):
        if parts[q] > 1 and merging[q] < 0:
            reduce_query[r] = q
            free[q] = reduce_ptr[r]
            reduce_ptr[r + 1] = reduce_ptr[r] + parts[q]
            r += 1
    slots = reduce_ptr[reduced]
    for q in range(batch):
        if merging[q] >= 0:
            free[q] = slots
            slots += parts[q] - 1
            segment_span[merging[q]] = parts[q] - 1
    first_slot = free.copy()
    for i in range(num_items):
        for e in range(item_query_ptr[i], item_query_ptr[i + 1]):
            q = entry_query[e]
            if parts[q] == 1:
                entry_slot[e] = DIRECT
            elif merging[q] == i:
                entry_slot[e] = MERGES - first_slot[q]
            else:
                entry_slot[e] = free[q]
                free[q] += 1
    return (
        tile_ptr, item_segment_ptr, item_query_ptr, segment_row[:s], segment_start[:s],
        segment_end[:s], segment_span[:s], entry_query, entry_slot, reduce_query, reduce_ptr, parts,
    )  # fmt: skip
