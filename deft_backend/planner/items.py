"""Turn groups into work items: the first of the host planner's two compiled steps."""

import numpy as np

from deft_backend.compile.host_jit import host_jit
from deft_backend.policies.edges import Int32Array, Int64Array

# Columns of the array of items.
GROUP, FIRST_QUERY, END_QUERY, FIRST_SEGMENT, END_SEGMENT, SHAPE, COLUMNS = range(7)

SORTED_TOKENS = (1 << 34) - 1
"""Items are ordered by their tokens up to this number; longer items count as equally long."""

MOST_ITEMS = 1 << 26
"""Most items of a plan: an item's number must fit the low bits of its sorting key."""


@host_jit
def place_of(shape: int, masked: int) -> int:
    """Index in ITEM_ORDER of a tile shape, if `masked` is the number of the masked tile."""
    return masked if shape == masked else masked - 1 - shape


@host_jit
def _sorting_key(place: int, tokens: int, number: int) -> int:
    """Sorting key of an item: by place in ITEM_ORDER, then longest first, then by number."""
    shortness = SORTED_TOKENS - min(np.int64(tokens), SORTED_TOKENS)
    key: int = (place * (SORTED_TOKENS + 1) + shortness) * MOST_ITEMS + number
    return key


@host_jit
def _copy_row(source: Int64Array, row: int, target: Int64Array, to: int) -> None:
    """Copy an item: Numba compiles the assignment of a slice for seconds, to format its errors."""
    for column in range(COLUMNS):
        target[to, column] = source[row, column]


@host_jit
def list_items(
    query_ptr: Int32Array, segment_ptr: Int32Array, start: Int32Array, end: Int32Array,
    attend_begin: Int32Array, attend_end: Int32Array, tile_queries: Int64Array,
    tile_segments: Int64Array,
) -> Int64Array:  # fmt: skip
    """Cut groups into items, in a plan's order.

    A group with more queries than the largest tile is cut into even tiles. A tile that attends to
    more segments than its shape holds is cut into several items. An item's segments are those of
    its group, from the first to the last that any query of the tile attends to.

    A tile shape holds `tile_queries` and `tile_segments` [T]; the masked tile is the last. The
    other arrays are those of :class:`~deft_backend.policies.Grouping`.

    Returns for each item its group, the range of the group's queries, the range of the grouping's
    segments, and its tile shape. Items are in the order of ITEM_ORDER. Within a shape the longest
    item is first, and equally long items keep the policy's order.
    """
    masked = len(tile_queries) - 1
    largest = 1
    for shape in range(masked):
        largest = max(largest, tile_queries[shape])
    count = 0
    capacity = len(query_ptr) + 16
    items = np.empty((capacity, COLUMNS), dtype=np.int64)
    keys = np.empty(capacity, dtype=np.int64)
    for g in range(len(query_ptr) - 1):
        queries = query_ptr[g + 1] - query_ptr[g]
        # One range that every query attends to needs no mask; anything else does.
        several = segment_ptr[g + 1] - segment_ptr[g] != 1
        if not several:
            s = segment_ptr[g]
            several = attend_begin[s] > 0 or attend_end[s] < queries
        held_queries = tile_queries[masked] if several else largest
        tiles = (queries + held_queries - 1) // held_queries
        for t in range(tiles):
            first = t * queries // tiles
            stop = (t + 1) * queries // tiles
            shape = masked if several else 0
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
                    more_items = np.empty((capacity, COLUMNS), dtype=np.int64)
                    more_keys = np.empty(capacity, dtype=np.int64)
                    for i in range(count):
                        _copy_row(items, i, more_items, i)
                        more_keys[i] = keys[i]
                    items, keys = more_items, more_keys
                items[count, GROUP] = g
                items[count, FIRST_QUERY] = first
                items[count, END_QUERY] = stop
                items[count, FIRST_SEGMENT] = begin
                items[count, END_SEGMENT] = s
                items[count, SHAPE] = shape
                keys[count] = _sorting_key(place_of(shape, masked), tokens, count)
                count += 1
    # Each key ends with its item's number: Numba sorts such keys faster than it sorts indices.
    found = np.empty((count, COLUMNS), dtype=np.int64)
    for i, key in enumerate(np.sort(keys[:count])):
        _copy_row(items, key % MOST_ITEMS, found, i)
    return found
