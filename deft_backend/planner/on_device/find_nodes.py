"""Device planner, 3: nodes of the forest, from what neighbours share.

A node ends where the longest common prefix of some neighbours does. Its queries reach from the
nearest smaller cut on the left to the nearest on the right, and its tokens begin at the larger of
the two; several cuts of the same node are led by the leftmost. A request's own tokens, its leaf,
begin at the larger of the cuts beside it. Every cut looks at every other: a batch has few.
"""

from __future__ import annotations

import triton.language as tl
from triton import jit
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@jit(do_not_specialize=["batch", "small_tile", "large_tile"])
def find_nodes(
    cut_ptr,
    first_ptr,
    queries_ptr,
    parent_ptr,
    leaf_parent_ptr,
    leaves_ptr,
    below_ptr,
    batch,
    small_tile,
    large_tile,
    BATCH: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Nodes by the position of their leading cut; position 0 stands for the virtual root.

    first, queries, parent, leaves [B]: the node's first position, its queries (0: no cut of a node
    leads here), the node above, and how many requests have their leaf right below. leaf_parent [B]:
    the node above the leaf of the request at each position. below [2, B]: tiles of the nodes right
    below, by tile shape; tiles hold `small_tile` and `large_tile` queries.
    """
    if OVERLAPPED:
        gdc_launch_dependents()
        gdc_wait()
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = places[:, None]
    other = tl.arange(0, BATCH)[None, :]
    is_place = places < batch
    cut = tl.load(cut_ptr + places, mask=is_place, other=0)
    behind = tl.load(cut_ptr + places + 1, mask=is_place, other=0)
    other_cut = tl.load(cut_ptr + other, mask=other < batch, other=0)
    other_behind = tl.load(cut_ptr + other + 1, mask=other < batch, other=0)

    # Nearest smaller cuts. The edges of the batch, before 0 and at `batch`, share nothing.
    smaller = other_cut < cut[:, None]
    left = smaller & (other < place)
    right = smaller & (other > place) & (other < batch)
    first = tl.reduce(tl.where(left, other, 0), 1, tl.standard._elementwise_max)
    stop = tl.reduce(tl.where(right, other, batch), 1, tl.standard._elementwise_min)
    of_node = (other_cut == cut[:, None]) & (other > first[:, None]) & (other <= place)
    leader = tl.reduce(tl.where(of_node, other, BATCH), 1, tl.standard._elementwise_min)
    leads = is_place & (cut > 0) & (leader == places)
    queries = tl.where(leads, stop - first, 0)

    # The node above ends at the larger of those cuts. If it is the right one, that one leads:
    # everything back to `first` is larger. If it is the left one, its leader is left of it.
    start = tl.load(cut_ptr + first, mask=leads, other=0)
    start_right = tl.load(cut_ptr + stop, mask=leads, other=0)
    lower = (other_cut < start[:, None]) & (other < first[:, None])
    edge = tl.reduce(tl.where(lower, other, 0), 1, tl.standard._elementwise_max)
    of_above = (other_cut == start[:, None]) & (other > edge[:, None]) & (other <= first[:, None])
    above = tl.reduce(tl.where(of_above, other, BATCH), 1, tl.standard._elementwise_min)
    parent = tl.where(start_right > start, stop, tl.where(start > 0, above, 0))

    own_leaf = (tl.maximum(other_cut, other_behind) == cut[:, None]) & (other < batch)
    own_leaf = own_leaf & (other >= first[:, None]) & (other < stop[:, None])
    leaves = tl.reduce(own_leaf.to(tl.int32), 1, tl.standard._sum_combine)
    leaf_parent = tl.where(behind > cut, places + 1, tl.where(cut > 0, leader, 0))

    tl.store(first_ptr + places, first, mask=is_place)
    tl.store(queries_ptr + places, queries, mask=is_place)
    tl.store(parent_ptr + places, tl.where(leads, parent, 0), mask=is_place)
    tl.store(leaves_ptr + places, tl.where(leads, leaves, 0), mask=is_place)
    tl.store(leaf_parent_ptr + places, leaf_parent, mask=is_place)
    is_large = queries > small_tile
    held = tl.where(is_large, large_tile, tl.maximum(small_tile, 1))
    tiles = (queries + held - 1) // held
    counter = below_ptr + is_large.to(tl.int32) * BATCH + parent
    tl.atomic_add(counter, tiles, mask=leads & (parent > 0))
