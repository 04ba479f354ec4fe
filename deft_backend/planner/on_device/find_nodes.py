"""Device planner, 3: nodes of the forest, from what neighbours share.

A cut is the number of tokens that two neighbours share. A node ends at a cut. Its queries reach
from the nearest smaller cut on the left to the nearest smaller cut on the right. Its tokens begin
at the larger of these two. If several cuts belong to one node, the leftmost cut leads. A leaf, the
request's own tokens, begins at the larger of the cuts on both sides. Every cut looks at every other
cut, because a batch has few.
"""

from __future__ import annotations

import triton.language as tl
from triton import jit
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deft_backend.planner.on_device.arrays import Nodes, Ranks
from deft_backend.planner.on_device.tiles import tiles_of


@jit(do_not_specialize=["batch", "small_tile", "large_tile"])
def find_nodes(
    first_ptr,
    nodes: Nodes,
    ranks: Ranks,
    batch,
    small_tile,
    large_tile,
    BATCH: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Write `Nodes`, BLOCK places in each program.

    Tiles hold `small_tile` and `large_tile` queries. The kernel also sets `Ranks` to zero for the
    next plan.
    """
    if OVERLAPPED:
        gdc_launch_dependents()
        gdc_wait()
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = places[:, None]
    other = tl.arange(0, BATCH)[None, :]
    is_place = places < batch
    none = tl.full([BLOCK], 0, tl.int32)
    tl.store(ranks.rank + places, none, mask=is_place)
    tl.store(ranks.common + places, none, mask=is_place)
    cut = tl.load(nodes.cut + places, mask=is_place, other=0)
    behind = tl.load(nodes.cut + places + 1, mask=is_place, other=0)
    other_cut = tl.load(nodes.cut + other, mask=other < batch, other=0)
    other_behind = tl.load(nodes.cut + other + 1, mask=other < batch, other=0)

    # Nearest smaller cuts. The edges of the batch, before 0 and at `batch`, share nothing.
    first = none
    leader = none
    stop = none
    parent = none
    leaves = none
    if tl.reduce(cut, 0, tl.standard._elementwise_max) > 0:
        smaller = other_cut < cut[:, None]
        left = smaller & (other < place)
        first = tl.reduce(tl.where(left, other, 0), 1, tl.standard._elementwise_max)
        of_node = (other_cut == cut[:, None]) & (other > first[:, None]) & (other <= place)
        leader = tl.reduce(tl.where(of_node, other, BATCH), 1, tl.standard._elementwise_min)
    leads = is_place & (cut > 0) & (leader == places)
    if tl.reduce(leads.to(tl.int32), 0, tl.standard._elementwise_max) > 0:
        right = (other_cut < cut[:, None]) & (other > place) & (other < batch)
        stop = tl.reduce(tl.where(right, other, batch), 1, tl.standard._elementwise_min)
        # The node above ends at the larger of these two cuts. The right one leads, because every
        # cut back to `first` is larger. The left one has its leader to its left.
        start = tl.load(nodes.cut + first, mask=leads, other=0)
        start_right = tl.load(nodes.cut + stop, mask=leads, other=0)
        lower = (other_cut < start[:, None]) & (other < first[:, None])
        edge = tl.reduce(tl.where(lower, other, 0), 1, tl.standard._elementwise_max)
        of_above = (other_cut == start[:, None]) & (other > edge[:, None])
        of_above = of_above & (other <= first[:, None])
        above = tl.reduce(tl.where(of_above, other, BATCH), 1, tl.standard._elementwise_min)
        parent = tl.where(start_right > start, stop, tl.where(start > 0, above, 0))
        own_leaf = (tl.maximum(other_cut, other_behind) == cut[:, None]) & (other < batch)
        own_leaf = own_leaf & (other >= first[:, None]) & (other < stop[:, None])
        leaves = tl.reduce(own_leaf.to(tl.int32), 1, tl.standard._sum_combine)
    queries = tl.where(leads, stop - first, 0)
    leaf_parent = tl.where(behind > cut, places + 1, tl.where(cut > 0, leader, 0))

    tl.store(first_ptr + places, first, mask=is_place)
    tl.store(nodes.queries + places, queries, mask=is_place)
    tl.store(nodes.parent + places, tl.where(leads, parent, 0), mask=is_place)
    tl.store(nodes.leaves + places, tl.where(leads, leaves, 0), mask=is_place)
    tl.store(nodes.leaf_parent + places, leaf_parent, mask=is_place)
    is_large, tiles = tiles_of(queries, small_tile, large_tile)
    counter = nodes.below + is_large.to(tl.int32) * BATCH + parent
    tl.atomic_add(counter, tiles, mask=leads & (parent > 0))
