"""Device planner, 4 of `fasttree`: the greedy search over the edges of the forest.

The host planner's search (``policies/fasttree.py``), level by level. Nodes of a level decide about
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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deft_backend.planner.on_device.arrays import Chosen, Nodes, Places, Ranges
from deft_backend.planner.on_device.choose_ranges import write_leaves, write_nodes
from deft_backend.planner.on_device.tiles import tiles_of, total


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
def _padding(queries, context, COSTS: tl.constexpr):
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


@jit(do_not_specialize=["batch", "small_tile", "large_tile", "max_entries", "max_items"])
def assign_edges(
    order_ptr,
    seq_lens_ptr,
    first_ptr,
    nodes: Nodes,
    ranges: Ranges,
    chosen_nodes: Chosen,
    children: Places,
    batch,
    small_tile,
    large_tile,
    max_entries,
    max_items,
    BATCH: tl.constexpr,
    BLOCKS: tl.constexpr,
    COSTS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Write all ranges, and `Chosen`, and replace `order`; one program.

    `children` is memory for this kernel alone: queries and end of the child at each place, whether
    it takes its node's tokens along, and the queries of such siblings before it.

    If the ranges would need more than `max_items` items or `max_entries` entries, every request
    reads its whole context by itself.
    """
    if OVERLAPPED:
        gdc_launch_dependents()
        gdc_wait()
    place = tl.arange(0, BATCH)
    inside = place < batch
    queries = tl.load(nodes.queries + place, mask=inside, other=0)
    parent = tl.load(nodes.parent + place, mask=inside, other=0)
    end = tl.load(nodes.cut + place, mask=inside, other=0)
    first = tl.load(first_ptr + place, mask=inside, other=0)
    leaf_parent = tl.load(nodes.leaf_parent + place, mask=inside, other=0)
    request = tl.load(order_ptr + place, mask=inside, other=0)
    length = tl.load(seq_lens_ptr + request // BLOCKS, mask=inside, other=0).to(tl.int32)
    is_node = queries > 0
    leaf_above = tl.gather(end, leaf_parent, 0)

    none = tl.full([BATCH], 0, tl.int32)
    tl.store(children.part + BATCH + place, none)  # whether the node's last query leaves it
    begin = none
    kept = queries  # queries that stay with the node
    moved = first  # place of the node's first query, once siblings stand in their new order
    leaf_begin = none
    leaf_moved = place
    level = is_node & (parent == 0)
    while total(level.to(tl.int32)) > 0:
        in_level = level.to(tl.int32)
        is_child = is_node & (parent > 0) & (tl.gather(in_level, parent, 0) > 0)
        is_leaf = inside & (leaf_parent > 0) & (tl.gather(in_level, leaf_parent, 0) > 0)
        tl.store(children.num_chunks + first, queries, mask=is_child)
        tl.store(children.item + first, end, mask=is_child)
        tl.store(children.num_chunks + place, none + 1, mask=is_leaf)
        tl.store(children.item + place, length, mask=is_leaf)
        tl.debug_barrier()
        at = first
        joined = none
        active = level
        while total(active.to(tl.int32)) > 0:
            held = tl.load(children.num_chunks + at, mask=active, other=1)
            stop = tl.load(children.item + at, mask=active, other=0)
            context = end - begin
            split_kv = _padding(kept, context, COSTS) + _padding(held, stop - end, COSTS)
            split_kv += COSTS.GAMMA * held.to(tl.int64)
            split_q = _padding(kept - held, context, COSTS) + _padding(held, stop - begin, COSTS)
            joins = active & (split_kv > split_q)
            tl.store(children.entry + at, joins.to(tl.int32), mask=active)
            tl.store(children.part + at, joined, mask=active)
            joined += tl.where(joins, held, 0)
            kept -= tl.where(joins, held, 0)
            at += tl.where(active, held, 0)
            active = level & (at < first + queries)
        tl.debug_barrier()
        # Where children begin and stand. Siblings before a child that stays: all but the joined.
        joins = tl.load(children.entry + first, mask=is_child, other=0) > 0
        before = tl.load(children.part + first, mask=is_child, other=0)
        stays = first - tl.gather(first, parent, 0) - before
        base = tl.gather(moved, parent, 0)
        behind = base + tl.gather(kept, parent, 0) + before
        moved = tl.where(is_child, tl.where(joins, behind, base + stays), moved)
        above = tl.where(joins, tl.gather(begin, parent, 0), tl.gather(end, parent, 0))
        begin = tl.where(is_child, above, begin)

        joins = tl.load(children.entry + place, mask=is_leaf, other=0) > 0
        before = tl.load(children.part + place, mask=is_leaf, other=0)
        stays = place - tl.gather(first, leaf_parent, 0) - before
        base = tl.gather(moved, leaf_parent, 0)
        left = tl.gather(kept, leaf_parent, 0)
        spot = tl.where(joins, base + left + before, base + stays)
        leaf_moved = tl.where(is_leaf, spot, leaf_moved)
        # An empty leaf that stays alone with its parent ends the parent's range itself.
        lone = is_leaf & (joins == 0) & (length == leaf_above) & (left == 1)
        joins = joins | lone
        above = tl.where(joins, tl.gather(begin, leaf_parent, 0), leaf_above)
        leaf_begin = tl.where(is_leaf, above, leaf_begin)
        tl.store(children.part + BATCH + leaf_parent, none + 1, mask=lone)
        level = is_child
    tl.debug_barrier()
    kept = tl.where(tl.load(children.part + BATCH + place) > 0, 0, kept)

    _, tiles = tiles_of(kept, small_tile, large_tile)
    num_entries = total(tl.where(is_node, kept, 0)) + batch
    num_items = total(tl.where(is_node, tiles, 0)) + batch
    if (num_entries > max_entries) | (num_items > max_items):
        kept = none
        leaf_begin = none
        leaf_moved = place
    chosen = (is_node & (kept > 0)).to(tl.int32)
    write_nodes(ranges, chosen_nodes, chosen, moved, kept, begin, end, BATCH)
    write_leaves(ranges, inside, leaf_moved, leaf_begin, length, BATCH)
    tl.store(order_ptr + leaf_moved, request, mask=inside)
