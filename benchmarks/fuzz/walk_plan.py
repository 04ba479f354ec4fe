"""Walk a plan as both stages do, and find what is wrong with it.

The walk knows page tables and lengths, and nothing of nodes or policies.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from deft_backend.planner import Plan
from deft_backend.planner.encoding import (
    DIRECT,
    ITEM_ORDER,
    MERGES,
    OPEN_END,
    SPAN_MASK,
    SPAN_SHIFT,
)
from deft_backend.policies import Target
from deft_backend.shapes import MAX_MERGED


def fault_of(
    plan: Plan,
    table: npt.NDArray[np.int32],
    rows: Any,
    seq_lens: Any,
    page_size: int,
    target: Target,
    private_tokens: int = 0,
) -> str:
    """The first mistake of a plan, in words; empty if every query gets its own attention.

    - `table, rows, seq_lens`: the batch as it runs, int32 arrays; requests may have grown since the
      plan.
    - `target`: its tile shapes bound the items. It says how many queries a request has.
    - `private_tokens`: last tokens of each request that no two queries may read together.
    """
    tile_ptr, item_segment_ptr, item_query_ptr, *arrays = (
        array.tolist() for array in plan.arrays().values()
    )
    segment_request, segment_start, segment_end, segment_span, *arrays = arrays
    entry_query, entry_slot, reduce_query, reduce_ptr = arrays
    rows, seq_lens, blocks = rows.tolist(), seq_lens.tolist(), target.query_blocks
    requests, tile_segments = len(seq_lens), (*target.tile_segments, 1)
    batch = requests * blocks
    tile_queries = (*target.tile_queries, target.ordered_queries(batch))
    lens = [length for length in seq_lens for _ in range(blocks)]  # of each query
    items = len(item_query_ptr) - 1
    # The change of how often a query attends to a token, at that token.
    change = np.zeros((batch, max(lens, default=0) + 1), dtype=np.int32)
    capacity = max(1, len(entry_slot))
    slot_query, slot_place, merged_slot = [-1] * capacity, [-1] * capacity, [0] * capacity
    outputs = [0] * batch
    if tile_ptr[0] != 0 or tile_ptr[len(tile_ptr) - 1] != items:
        return f"the items of the tile shapes are not in order ({0})"
    for place in range(len(ITEM_ORDER)):
        if tile_ptr[place + 1] < tile_ptr[place]:
            return f"the items of the tile shapes are not in order ({place})"
        shape = ITEM_ORDER[place]
        for item in range(tile_ptr[place], tile_ptr[place + 1]):
            first, stop = item_query_ptr[item], item_query_ptr[item + 1]
            held = stop - first
            if held < 1 or held > tile_queries[shape]:
                return f"an item holds no query, or more than its tile ({item})"
            begin, end = item_segment_ptr[item], item_segment_ptr[item + 1]
            if end - begin < 1 or end - begin > tile_segments[shape]:
                return f"an item holds no range, or more than its tile ({item})"
            for entry in range(first, stop):
                if entry_query[entry] < 0 or entry_query[entry] >= batch:
                    return f"a range or a query has an impossible number ({item})"
            merged = 0
            for segment in range(begin, end):
                request = segment_request[segment]
                if request < 0 or request >= requests:
                    return f"a range or a query has an impossible number ({item})"
                start, last = segment_start[segment], segment_end[segment]
                if last == OPEN_END:
                    last = seq_lens[request]
                low, high = 0, held
                if shape == 0:
                    if begin != item:
                        return f"an item's span is impossible ({item})"
                    merged = segment_span[segment]
                else:
                    low = segment_span[segment] & SPAN_MASK
                    high = segment_span[segment] >> SPAN_SHIFT
                    if low < 0 or low >= high or high > held:
                        return f"an item's span is impossible ({item})"
                    if tile_segments[shape] == 1 and (low != 0 or high != held):
                        return f"an item's span is impossible ({item})"
                if start < 0 or last < start or last > seq_lens[request]:
                    return f"a range or a query has an impossible number ({item})"
                for entry in range(first + low, first + high):
                    query = entry_query[entry]
                    if last > lens[query]:
                        return f"a query attends beyond its context ({query})"
                    if high - low > 1 and last > start and last > lens[query] - private_tokens:
                        return f"several queries share query tokens ({query})"
                    if last > start:
                        pages = slice(start // page_size, (last - 1) // page_size + 1)
                        other = table[rows[request], pages]
                        if not np.array_equal(table[rows[query // blocks], pages], other):
                            return f"a query attends to another's tokens ({query})"
                    change[query, start] += 1
                    change[query, last] -= 1
            for entry in range(first, stop):
                query, slot = entry_query[entry], entry_slot[entry]
                if slot >= 0:
                    if slot >= capacity or slot_query[slot] >= 0:
                        return f"a slot is written twice, or lies outside the workspace ({item})"
                    slot_query[slot], slot_place[slot] = query, place
                    continue
                outputs[query] += 1
                if slot == DIRECT:
                    if merged != 0:
                        return f"an item merges an impossible number of results ({item})"
                    continue
                if held != 1 or merged < 1 or merged > MAX_MERGED:
                    return f"an item merges an impossible number of results ({item})"
                from_slot = MERGES - slot
                for at in range(from_slot, from_slot + merged):
                    # Earlier launches have written it: places are in the order of `order`, and
                    # launches of small tiles come last.
                    if at >= capacity or (slot_query[at] != query and slot_query[at] >= 0):
                        return f"a result is merged by another query, or too early ({item})"
                    merged_slot[at] += 1
    for query in range(batch):
        if (change[query, : lens[query]].cumsum() != 1).any():
            return f"a query does not attend to each of its tokens once ({query})"
    if len(reduce_ptr) != len(reduce_query) + 1 or reduce_ptr[0] != 0:
        return f"an output is not written just once ({-1})"
    for place in range(len(reduce_query)):
        query = reduce_query[place]
        if query < 0 or query >= batch:
            return f"a range or a query has an impossible number ({query})"
        outputs[query] += 1
        first, stop = reduce_ptr[place], reduce_ptr[place + 1]
        if stop - first < 2:
            return f"an output is not written just once ({query})"
        for at in range(first, stop):
            if at >= capacity or slot_query[at] != query:
                return f"a result is merged by another query, or too early ({query})"
            merged_slot[at] += 1
    for query in range(batch):
        if outputs[query] != 1:
            return f"an output is not written just once ({query})"
    for at in range(capacity):
        written = 1 if slot_query[at] >= 0 else 0
        if merged_slot[at] != written:
            return f"a partial result is never merged ({at})"
    # A small tile that merges reads results of other tile shapes alone.
    small = ITEM_ORDER.index(0)
    for item in range(tile_ptr[small], tile_ptr[small + 1]):
        entry = item_query_ptr[item]
        if entry_slot[entry] <= MERGES:
            from_slot = MERGES - entry_slot[entry]
            for at in range(from_slot, from_slot + segment_span[item_segment_ptr[item]]):
                query = entry_query[entry]
                if slot_query[at] != query or slot_place[at] == small:
                    return f"a result is merged by another query, or too early ({query})"
    return ""
