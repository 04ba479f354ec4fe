"""Turn work items into a plan's arrays: the second of the host planner's two compiled steps."""

from typing import NamedTuple

import numpy as np

from deft_backend.compile.host_jit import host_jit
from deft_backend.planner.encoding import DIRECT, MERGES, OPEN_END, SPAN_SHIFT
from deft_backend.planner.items import (
    END_QUERY,
    END_SEGMENT,
    FIRST_QUERY,
    FIRST_SEGMENT,
    GROUP,
    SHAPE,
    place_of,
)
from deft_backend.policies.edges import BoolArray, Int32Array, Int64Array
from deft_backend.shapes.kernel_limits import MAX_MERGED

NO_ITEM = -1


class PlanArrays(NamedTuple):
    """The fields of :class:`~deft_backend.planner.plan.Plan`, and `parts`."""

    tile_ptr: Int32Array
    item_segment_ptr: Int32Array
    item_query_ptr: Int32Array
    segment_request: Int32Array
    segment_start: Int32Array
    segment_end: Int32Array
    segment_span: Int32Array
    entry_query: Int32Array
    entry_slot: Int32Array
    reduce_query: Int32Array
    reduce_ptr: Int32Array
    parts: Int32Array  # [B] items that each query takes part in


@host_jit
def fill_plan(
    items: Int64Array, query_ptr: Int32Array, queries: Int32Array, request: Int32Array,
    start: Int32Array, end: Int32Array, is_open: BoolArray, attend_begin: Int32Array,
    attend_end: Int32Array, batch: int, blocks: int, shapes: int,
) -> PlanArrays:  # fmt: skip
    """Lay out a plan of the items of :func:`~deft_backend.planner.items.list_items`.

    `batch` counts the queries, `blocks` the query blocks of each request, and `shapes` the tile
    shapes. The other arrays are those of :class:`~deft_backend.policies.Grouping`.
    """
    tile_ptr = _count_shapes(items, shapes)
    item_segment_ptr, segment_request, segment_start, segment_end, segment_span = _write_segments(
        items, request, start, end, is_open, attend_begin, attend_end, blocks
    )
    item_query_ptr, entry_query, parts = _write_entries(items, query_ptr, queries, batch)
    small = place_of(0, shapes - 1)
    merging = _choose_merging_items(
        tile_ptr[small], tile_ptr[small + 1], item_query_ptr, entry_query, parts
    )
    for i in range(tile_ptr[small], tile_ptr[small + 1]):
        query = entry_query[item_query_ptr[i]]  # an item of a small tile has one segment: its own
        segment_span[i] = parts[query] - 1 if merging[query] == i else 0
    reduce_query, reduce_ptr = _list_reductions(parts, merging)
    entry_slot = _assign_slots(
        item_query_ptr, entry_query, parts, merging, reduce_query, reduce_ptr
    )
    return PlanArrays(
        tile_ptr, item_segment_ptr, item_query_ptr, segment_request, segment_start, segment_end,
        segment_span, entry_query, entry_slot, reduce_query, reduce_ptr, parts,
    )  # fmt: skip


@host_jit
def _count_shapes(items: Int64Array, shapes: int) -> Int32Array:
    """[T + 1] int32: `tile_ptr`, for items that lie in ITEM_ORDER."""
    tile_ptr = np.zeros(shapes + 1, dtype=np.int32)
    for i in range(len(items)):
        tile_ptr[place_of(items[i, SHAPE], shapes - 1) + 1] += 1
    for place in range(shapes):
        tile_ptr[place + 1] += tile_ptr[place]
    return tile_ptr


@host_jit
def _write_segments(
    items: Int64Array, request: Int32Array, start: Int32Array, end: Int32Array, is_open: BoolArray,
    attend_begin: Int32Array, attend_end: Int32Array, blocks: int,
) -> tuple[Int32Array, Int32Array, Int32Array, Int32Array, Int32Array]:  # fmt: skip
    """item_segment_ptr, segment_request, segment_start, segment_end and segment_span.

    Segments to which no query of the item attends are left out.
    """
    most = 0
    for i in range(len(items)):
        most += items[i, END_SEGMENT] - items[i, FIRST_SEGMENT]
    item_segment_ptr = np.zeros(len(items) + 1, dtype=np.int32)
    segment_request = np.empty(most, dtype=np.int32)
    segment_start = np.empty(most, dtype=np.int32)
    segment_end = np.empty(most, dtype=np.int32)
    segment_span = np.empty(most, dtype=np.int32)
    count = 0
    for i in range(len(items)):
        first = items[i, FIRST_QUERY]
        stop = items[i, END_QUERY]
        for at in range(items[i, FIRST_SEGMENT], items[i, END_SEGMENT]):
            begin = max(np.int64(attend_begin[at]), first) - first
            behind = min(np.int64(attend_end[at]), stop) - first
            if begin >= behind:
                continue
            segment_request[count] = request[at] // blocks
            segment_start[count] = start[at]
            segment_end[count] = OPEN_END if is_open[at] else end[at]
            segment_span[count] = begin | behind << SPAN_SHIFT
            count += 1
        item_segment_ptr[i + 1] = count
    return (
        item_segment_ptr, segment_request[:count], segment_start[:count], segment_end[:count],
        segment_span[:count],
    )  # fmt: skip


@host_jit
def _write_entries(
    items: Int64Array, query_ptr: Int32Array, queries: Int32Array, batch: int
) -> tuple[Int32Array, Int32Array, Int32Array]:
    """item_query_ptr, entry_query, and the items that each query takes part in."""
    item_query_ptr = np.zeros(len(items) + 1, dtype=np.int32)
    for i in range(len(items)):
        item_query_ptr[i + 1] = item_query_ptr[i] + items[i, END_QUERY] - items[i, FIRST_QUERY]
    entry_query = np.empty(item_query_ptr[-1], dtype=np.int32)
    parts = np.zeros(batch, dtype=np.int32)
    for i in range(len(items)):
        first = query_ptr[items[i, GROUP]] + items[i, FIRST_QUERY]
        for e in range(item_query_ptr[i], item_query_ptr[i + 1]):
            query = queries[first + e - item_query_ptr[i]]
            entry_query[e] = query
            parts[query] += 1
    return item_query_ptr, entry_query, parts


@host_jit
def _choose_merging_items(
    begin: int, end: int, item_query_ptr: Int32Array, entry_query: Int32Array, parts: Int32Array
) -> Int64Array:
    """[B] int64: the item that merges each query's partial results, or NO_ITEM.

    Items `begin` to `end` are those of the small tile, which the last launch of stage 1 runs. An
    item of one query merges the query's partial results under two conditions: earlier launches
    have written all others, and there are at most MAX_MERGED of these.
    """
    batch = len(parts)
    merging = np.full(batch, NO_ITEM, dtype=np.int64)
    in_last_launch = np.zeros(batch, dtype=np.int32)
    for i in range(begin, end):
        for e in range(item_query_ptr[i], item_query_ptr[i + 1]):
            in_last_launch[entry_query[e]] += 1
        if item_query_ptr[i + 1] - item_query_ptr[i] == 1:
            merging[entry_query[item_query_ptr[i]]] = i
    for query in range(batch):
        others = parts[query] - 1
        if in_last_launch[query] != 1 or others < 1 or others > MAX_MERGED:
            merging[query] = NO_ITEM
    return merging


@host_jit
def _list_reductions(parts: Int32Array, merging: Int64Array) -> tuple[Int32Array, Int32Array]:
    """reduce_query and reduce_ptr: queries of several items whose results no item merges."""
    batch = len(parts)
    reduce_query = np.empty(batch, dtype=np.int32)
    reduce_ptr = np.zeros(batch + 1, dtype=np.int32)
    count = 0
    for query in range(batch):
        if parts[query] > 1 and merging[query] == NO_ITEM:
            reduce_query[count] = query
            reduce_ptr[count + 1] = reduce_ptr[count] + parts[query]
            count += 1
    return reduce_query[:count], reduce_ptr[: count + 1]


@host_jit
def _assign_slots(
    item_query_ptr: Int32Array, entry_query: Int32Array, parts: Int32Array, merging: Int64Array,
    reduce_query: Int32Array, reduce_ptr: Int32Array,
) -> Int32Array:  # fmt: skip
    """[E] int32: `entry_slot`. The slots of each query are contiguous and in item order.

    Stage 2's slots come first; behind them lie the results that items merge.
    """
    first_slot = np.zeros(len(parts), dtype=np.int32)
    for r in range(len(reduce_query)):
        first_slot[reduce_query[r]] = reduce_ptr[r]
    slots = reduce_ptr[-1]
    for query in range(len(parts)):
        if merging[query] != NO_ITEM:
            first_slot[query] = slots
            slots += parts[query] - 1
    next_slot = first_slot.copy()
    entry_slot = np.empty(len(entry_query), dtype=np.int32)
    for i in range(len(item_query_ptr) - 1):
        for e in range(item_query_ptr[i], item_query_ptr[i + 1]):
            query = entry_query[e]
            if parts[query] == 1:
                entry_slot[e] = DIRECT
            elif merging[query] == i:
                entry_slot[e] = MERGES - first_slot[query]
            else:
                entry_slot[e] = next_slot[query]
                next_slot[query] += 1
    return entry_slot
