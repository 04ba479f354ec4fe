"""Device planner, 4 of `fasttree`: the greedy search over the edges of the forest.

The reference's search (``policies/fasttree.py``), level by level. Nodes of a level decide about
their children at the same time, each about one child after the other: what stays with a node
depends on the siblings before. So a level takes as many rounds as its widest node has children. A
node's children follow one another in depth-first order, so a node finds the next child at the place
behind the last one's queries.

Children that stay with their node move in front of those that take its tokens along. So the queries
of each range are neighbours, and the kernels that follow need not know about edges.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton import jit

from deft_backend.planner.on_device.arrays import Chosen, Nodes, Ranges, Search
from deft_backend.planner.on_device.choose_ranges import write_leaves, write_nodes
from deft_backend.planner.on_device.tiles import overlap, tiles_of, total


class EdgeCosts(NamedTuple):
    """FastTree's equations, as in ``policies/fasttree.py``, for two phases."""

    ALPHA: Any
    BETA: Any
    GAMMA: Any
    VECTORS: Any
    SMALL_ROWS: Any
    SMALL_TOKENS: Any
    LARGE_ROWS: Any
    LARGE_TOKENS: Any


@jit
def _padding(queries, context, COSTS):
    """``C_P``; 0 without queries or without context."""
    rows = queries * COSTS.VECTORS
    is_large = rows > COSTS.SMALL_ROWS
    last_small, last_large = rows % COSTS.SMALL_ROWS, rows % COSTS.LARGE_ROWS
    missing = tl.where(last_small > 0, COSTS.SMALL_ROWS - last_small, 0)
    missing_large = tl.where(last_large > 0, COSTS.LARGE_ROWS - last_large, 0)
    missing = tl.where(is_large, missing_large, missing)
    block = tl.where(is_large, COSTS.LARGE_TOKENS, COSTS.SMALL_TOKENS)
    short = rows * tl.maximum(block - context, 0)
    cost = COSTS.ALPHA * (missing.to(tl.int64) * context) + COSTS.BETA * short.to(tl.int64)
    return tl.where((queries > 0) & (context > 0), cost, 0)


@jit
def _lengths(order_ptr, seq_lens_ptr, place, there, BLOCKS):
    request = tl.load(order_ptr + place, mask=there, other=0)
    return tl.load(seq_lens_ptr + request // BLOCKS, mask=there, other=0).to(tl.int32)


@jit(
    do_not_specialize=[
        "batch",
        "small_tile",
        "large_tile",
        "max_items",
        "max_entries",
        "skips_empty",
    ]
)
def assign_edges(
    order_ptr,
    seq_lens_ptr,
    first_ptr,
    nodes: Nodes,
    ranges: Ranges,
    chosen_nodes: Chosen,
    memory,
    batch,
    small_tile,
    large_tile,
    max_items,
    max_entries,
    skips_empty,
    BATCH: tl.constexpr,
    BLOCKS: tl.constexpr,
    COSTS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Write all ranges, and `Chosen`, and replace `order`; one program, with `Search` in memory.

    If the ranges would need more than `max_items` items or `max_entries` entries, every request
    reads its whole context by itself. If `skips_empty` is 1, requests of length 0 have no range.
    """
    overlap(OVERLAPPED)
    search = Search(
        memory,
        memory + BATCH,
        memory + 2 * BATCH,
        memory + 3 * BATCH,
        memory + 4 * BATCH,
        memory + 5 * BATCH,
        memory + 6 * BATCH,
        memory + 7 * BATCH,
    )
    # The search keeps little in registers: the rest it loads again where it is needed.
    place = tl.arange(0, BATCH)
    inside = place < batch
    queries = tl.load(nodes.queries + place, mask=inside, other=0)
    parent = tl.load(nodes.parent + place, mask=inside, other=0)
    end = tl.load(nodes.cut + place, mask=inside, other=0)
    first = tl.load(first_ptr + place, mask=inside, other=0)
    none = tl.full([BATCH], 0, tl.int32)
    tl.store(search.leaf_begin + place, none)
    tl.store(search.leaf_place + place, place)
    tl.store(search.node_place + place, first)
    tl.store(search.deserted + place, none)
    begin = none
    kept = queries  # queries that stay with the node
    level = ((queries > 0) & (parent == 0)).to(tl.int32)
    while total(level) > 0:
        queries = tl.load(nodes.queries + place, mask=inside, other=0)
        parent = tl.load(nodes.parent + place, mask=inside, other=0)
        first = tl.load(first_ptr + place, mask=inside, other=0)
        is_child = (queries > 0) & (parent > 0) & (tl.gather(level, parent, 0) > 0)
        tl.store(search.queries + first, queries, mask=is_child)
        tl.store(search.end + first, end, mask=is_child)
        above = tl.load(nodes.leaf_parent + place, mask=inside, other=0)
        is_leaf = (above > 0) & (tl.gather(level, above, 0) > 0)
        tl.store(search.queries + place, none + 1, mask=is_leaf)
        length = _lengths(order_ptr, seq_lens_ptr, place, is_leaf, BLOCKS)
        tl.store(search.end + place, length, mask=is_leaf)
        tl.debug_barrier()
        at = first
        limit = tl.where(level > 0, first + queries, 0)
        joined = none
        while total((at < limit).to(tl.int32)) > 0:
            active = at < limit
            held = tl.load(search.queries + at, mask=active, other=1)
            stop = tl.load(search.end + at, mask=active, other=0)
            context = end - begin
            split_kv = _padding(kept, context, COSTS) + _padding(held, stop - end, COSTS)
            split_kv += COSTS.GAMMA * held.to(tl.int64)
            split_q = _padding(kept - held, context, COSTS) + _padding(held, stop - begin, COSTS)
            joins = active & (split_kv > split_q)
            tl.store(search.joins + at, joins.to(tl.int32), mask=active)
            tl.store(search.joined + at, joined, mask=active)
            joined += tl.where(joins, held, 0)
            kept -= tl.where(joins, held, 0)
            at += tl.where(active, held, 0)
        tl.debug_barrier()
        # Where children begin and stand. Siblings before a child that stays: all but the joined.
        parent = tl.load(nodes.parent + place, mask=inside, other=0)
        first = tl.load(first_ptr + place, mask=inside, other=0)
        queries = tl.load(nodes.queries + place, mask=inside, other=0)
        is_child = (queries > 0) & (parent > 0) & (tl.gather(level, parent, 0) > 0)
        joins = tl.load(search.joins + first, mask=is_child, other=0) > 0
        before = tl.load(search.joined + first, mask=is_child, other=0)
        base = tl.load(search.node_place + parent, mask=is_child, other=0)
        stays = first - tl.gather(first, parent, 0) - before
        moved = base + tl.where(joins, tl.gather(kept, parent, 0) + before, stays)
        tl.store(search.node_place + place, moved, mask=is_child)
        whole = tl.where(joins, tl.gather(begin, parent, 0), tl.gather(end, parent, 0))

        above = tl.load(nodes.leaf_parent + place, mask=inside, other=0)
        is_leaf = (above > 0) & (tl.gather(level, above, 0) > 0)
        joins = tl.load(search.joins + place, mask=is_leaf, other=0) > 0
        before = tl.load(search.joined + place, mask=is_leaf, other=0)
        base = tl.load(search.node_place + above, mask=is_leaf, other=0)
        stays = place - tl.gather(first, above, 0) - before
        left = tl.gather(kept, above, 0)
        tl.store(
            search.leaf_place + place, base + tl.where(joins, left + before, stays), mask=is_leaf
        )
        # An empty leaf that stays alone with its parent ends the parent's range itself.
        length = tl.load(search.end + place, mask=is_leaf, other=0)
        lone = is_leaf & (joins == 0) & (length == tl.gather(end, above, 0)) & (left == 1)
        tl.store(search.deserted + above, none + 1, mask=lone)
        whole_leaf = tl.where(joins | lone, tl.gather(begin, above, 0), tl.gather(end, above, 0))
        tl.store(search.leaf_begin + place, whole_leaf, mask=is_leaf)
        begin = tl.where(is_child, whole, begin)
        level = is_child.to(tl.int32)
        tl.debug_barrier()

    queries = tl.load(nodes.queries + place, mask=inside, other=0)
    kept = tl.where(tl.load(search.deserted + place) > 0, 0, kept)
    _, tiles = tiles_of(kept, small_tile, large_tile)
    fits = total(kept) + batch <= max_entries
    fits &= total(tl.where(kept > 0, tiles, 0)) + batch <= max_items
    kept = tl.where(fits, kept, 0)
    chosen = (kept > 0).to(tl.int32)
    moved = tl.load(search.node_place + place)
    write_nodes(ranges, chosen_nodes, chosen, moved, kept, begin, end, BATCH)
    request = tl.load(order_ptr + place, mask=inside, other=0)
    length = _lengths(order_ptr, seq_lens_ptr, place, inside, BLOCKS)
    leaf_place = tl.where(fits, tl.load(search.leaf_place + place), place)
    leaf_begin = tl.where(fits, tl.load(search.leaf_begin + place), 0)
    write_leaves(ranges, inside, leaf_place, leaf_begin, length, skips_empty, BATCH)
    tl.debug_barrier()
    tl.store(order_ptr + leaf_place, request, mask=inside)
