"""Device planner, 4: which nodes get KV ranges of their own, by measured costs.

The same decision as the host's (``policies/range_choice.py``), from the root down: a node's tokens
are read once for all of its queries, at the price of partial results, or with those below it. All
nodes whose parent has decided decide at once, so it takes as many rounds as the forest is deep.
One program: decisions are handed down between its threads.
"""

from __future__ import annotations

import triton.language as tl
from triton import jit
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@jit(do_not_specialize=["batch", "small_tile", "large_tile", "max_entries", "max_items"])
def choose_ranges(
    order_ptr,
    seq_lens_ptr,
    cut_ptr,
    queries_ptr,
    parent_ptr,
    leaf_parent_ptr,
    leaves_ptr,
    below_ptr,
    range_queries_ptr,
    range_begin_ptr,
    range_end_ptr,
    batch,
    small_tile,
    large_tile,
    max_entries,
    max_items,
    small_item_ns,
    small_token_ns,
    large_item_ns,
    large_token_ns,
    partial_ns,
    BATCH: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Ranges [2 B]: of nodes by their leading cut, then of leaves by position.

    range_queries (0: no range), range_begin, range_end: tokens of a range are read for all of its
    queries. Times are those of the whole GPU. If the ranges exceed `max_items` items or
    `max_entries` (item, query) pairs, every request reads its whole context by itself.
    """
    if OVERLAPPED:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.arange(0, BATCH)
    inside = place < batch
    queries = tl.load(queries_ptr + place, mask=inside, other=0)
    parent = tl.load(parent_ptr + place, mask=inside, other=0)
    end = tl.load(cut_ptr + place, mask=inside, other=0)
    leaves = tl.load(leaves_ptr + place, mask=inside, other=0)
    small_below = tl.load(below_ptr + place, mask=inside, other=0)
    large_below = tl.load(below_ptr + BATCH + place, mask=inside, other=0)
    is_node = queries > 0

    is_large = queries > small_tile
    held = tl.where(is_large, large_tile, tl.maximum(small_tile, 1))
    tiles = (queries + held - 1) // held
    own = tiles.to(tl.float32) * tl.where(is_large, large_token_ns, small_token_ns)
    if small_tile > 0:
        small_below += leaves
    else:  # GQA groups that fill more rows than the smallest tile has
        large_below += leaves
    below = (
        small_below.to(tl.float32) * small_token_ns + large_below.to(tl.float32) * large_token_ns
    )
    items = tiles.to(tl.float32) * tl.where(is_large, large_item_ns, small_item_ns)

    # Where the ranges below a node begin, times two, plus whether a range above them was chosen.
    state = tl.where(is_node, -1, 0)
    chosen = tl.full([BATCH], 0, tl.int32)
    begin = tl.full([BATCH], 0, tl.int32)
    waiting = tl.reduce(is_node.to(tl.int32), 0, tl.standard._sum_combine)
    while waiting > 0:
        above = tl.gather(state, parent, 0)
        ready = (state < 0) & (above >= 0)
        from_above = above >> 1
        tokens = (end - from_above).to(tl.float32)
        results = tl.where((above & 1) == 1, queries, 2 * queries).to(tl.float32)
        cheaper = tokens * own + items + results * partial_ns < tokens * below
        takes = ready & cheaper & (end > from_above)
        begin = tl.where(ready, from_above, begin)
        chosen = tl.where(takes, 1, chosen)
        state = tl.where(takes, end * 2 + 1, tl.where(ready, above, state))
        waiting -= tl.reduce(ready.to(tl.int32), 0, tl.standard._sum_combine)

    entries = tl.reduce(chosen * queries, 0, tl.standard._sum_combine) + batch
    total = tl.reduce(chosen * tiles, 0, tl.standard._sum_combine) + batch
    if (entries > max_entries) | (total > max_items):
        chosen = tl.full([BATCH], 0, tl.int32)
        state = tl.full([BATCH], 0, tl.int32)
    tl.store(range_queries_ptr + place, chosen * queries)
    tl.store(range_begin_ptr + place, begin)
    tl.store(range_end_ptr + place, end)

    leaf_parent = tl.load(leaf_parent_ptr + place, mask=inside, other=0)
    row = tl.load(order_ptr + place, mask=inside, other=0)
    length = tl.load(seq_lens_ptr + row, mask=inside, other=0).to(tl.int32)
    leaf = BATCH + place
    tl.store(range_queries_ptr + leaf, inside.to(tl.int32))
    tl.store(range_begin_ptr + leaf, tl.gather(state, leaf_parent, 0) >> 1)
    tl.store(range_end_ptr + leaf, length)
