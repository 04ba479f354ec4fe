"""Device planner, 4: which edges are cut, and so which nodes get KV ranges of their own.

The rules are those of the reference's policies. If no edge is cut, leaves read whole contexts.
If all are, each node has a range. `auto` (``policies/auto.py``) decides from the root down. Either
items of the node read its tokens once for all of its queries, at the price of partial
results. Or the ranges below the node include its tokens. Either way, its children take their
cheaper way. All nodes whose parent has decided decide at once: the rounds are as many as the forest
is deep. The kernel is one program, whose threads hand decisions down.
"""

from __future__ import annotations

import triton.language as tl
from triton import jit

from deft_backend.planner.on_device.arrays import Chosen, Costs, Nodes, Ranges
from deft_backend.planner.on_device.tiles import overlap, tiles_of, total


@jit
def write_nodes(ranges, chosen_nodes, chosen, first, queries, begin, end, BATCH):
    """Write the nodes' half of `Ranges`, and `Chosen`."""
    place = tl.arange(0, BATCH)
    tl.store(ranges.queries + place, chosen * queries)
    tl.store(ranges.begin + place, begin)
    tl.store(ranges.end + place, end)
    number = tl.associative_scan(chosen, 0, tl.standard._sum_combine) - chosen
    tl.store(chosen_nodes.count, total(chosen))
    tl.store(chosen_nodes.place + number, place, mask=chosen == 1)
    tl.store(chosen_nodes.first + number, first, mask=chosen == 1)
    tl.store(chosen_nodes.queries + number, queries, mask=chosen == 1)
    tl.store(chosen_nodes.begin + number, begin, mask=chosen == 1)
    tl.store(chosen_nodes.end + number, end, mask=chosen == 1)


@jit
def write_leaves(ranges, inside, place, begin, end, skips_empty, BATCH):
    """Write the leaves' half of `Ranges`: leaves stand at `place`, behind the nodes."""
    reads = inside & ((end > 0) | (skips_empty == 0))
    tl.store(ranges.queries + BATCH + place, reads.to(tl.int32))
    tl.store(ranges.begin + BATCH + place, begin)
    tl.store(ranges.end + BATCH + place, end)


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
def choose_ranges(
    order_ptr,
    seq_lens_ptr,
    first_ptr,
    nodes: Nodes,
    ranges: Ranges,
    chosen_nodes: Chosen,
    batch,
    small_tile,
    large_tile,
    max_items,
    max_entries,
    skips_empty,
    costs: Costs,
    BATCH: tl.constexpr,
    BLOCKS: tl.constexpr,
    EDGES: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Write all ranges, and `Chosen`, by the edge rule ``none``, ``all`` or ``measured``.

    `costs` are times of the whole GPU. If the ranges would need more than `max_items` items or
    `max_entries` entries, every request reads its whole context by itself. If `skips_empty` is 1,
    requests of length 0 have no range.
    """
    overlap(OVERLAPPED)
    place = tl.arange(0, BATCH)
    inside = place < batch
    queries = tl.load(nodes.queries + place, mask=inside, other=0)
    parent = tl.load(nodes.parent + place, mask=inside, other=0)
    end = tl.load(nodes.cut + place, mask=inside, other=0)
    first = tl.load(first_ptr + place, mask=inside, other=0)
    is_node = queries > 0

    is_large, tiles = tiles_of(queries, small_tile, large_tile)
    # A node's decision: where the ranges below it begin, times two. It is odd if a range above
    # them was chosen, and -1 while the node has not decided.
    state = tl.full([BATCH], 0, tl.int32)
    chosen = tl.full([BATCH], 0, tl.int32)
    begin = tl.full([BATCH], 0, tl.int32)
    if EDGES == "all":
        chosen = is_node.to(tl.int32)
        begin = tl.gather(end, parent, 0)
        state = tl.where(is_node, end * 2 + 1, 0)
    if EDGES == "measured":
        leaves = tl.load(nodes.leaves + place, mask=inside, other=0)
        small_below = tl.load(nodes.below + place, mask=inside, other=0)
        large_below = tl.load(nodes.below + BATCH + place, mask=inside, other=0)
        own = tiles.to(tl.float32) * tl.where(is_large, costs.large_token, costs.small_token)
        if small_tile > 0:
            small_below += leaves
        else:  # a GQA group is larger than the small tile
            large_below += leaves
        below = (
            small_below.to(tl.float32) * costs.small_token
            + large_below.to(tl.float32) * costs.large_token
        )
        items = tiles.to(tl.float32) * tl.where(is_large, costs.large_item, costs.small_item)
        leaf_token = costs.small_token if small_tile > 0 else costs.large_token
        state = tl.where(is_node, -1, 0)
        last = tl.where(is_node, first + queries - 1, 0)
        top = tl.gather(end, parent, 0)
        its = items + queries.to(tl.float32) * costs.partial  # items, and one result of each query
        length = (end - top).to(tl.float32)
        alone = tl.minimum(length * own + its, length * below)
        waiting = total(is_node.to(tl.int32))
        while waiting > 0:
            above = tl.gather(state, parent, 0)
            ready = (state < 0) & (above >= 0)
            from_above = above >> 1
            is_merged = above & 1
            tokens = (end - from_above).to(tl.float32)
            # What each node's own items would save its parent's children: only parents that decide
            # now count. No such node lies below another, so each sum is one of neighbours.
            decides = is_node & (tl.gather(ready.to(tl.int32), parent, 0) > 0)
            unmerged = 1 - tl.gather(is_merged, parent, 0)
            joined = (end - tl.gather(from_above, parent, 0)).to(tl.float32)
            more = its + (unmerged * queries).to(tl.float32) * costs.partial
            saved = tl.minimum(joined * own + more, joined * below) - alone
            saved = tl.where(decides, saved, 0.0)
            sums = tl.associative_scan(saved, 0, tl.standard._sum_combine)
            saved = tl.gather(sums, last, 0) - tl.gather(sums - saved, first, 0)
            saved += tokens * leaves.to(tl.float32) * leaf_token
            results = (queries * (2 - is_merged)).to(tl.float32)
            cheaper = tokens * own + items + results * costs.partial < saved
            takes = ready & cheaper & (end > from_above)
            begin = tl.where(ready, from_above, begin)
            chosen = tl.where(takes, 1, chosen)
            state = tl.where(takes, end * 2 + 1, tl.where(ready, above, state))
            waiting -= total(ready.to(tl.int32))

    num_entries = total(chosen * queries) + batch
    num_items = total(chosen * tiles) + batch
    if (num_entries > max_entries) | (num_items > max_items):
        chosen = tl.full([BATCH], 0, tl.int32)
        state = tl.full([BATCH], 0, tl.int32)
    write_nodes(ranges, chosen_nodes, chosen, first, queries, begin, end, BATCH)
    leaf_parent = tl.load(nodes.leaf_parent + place, mask=inside, other=0)
    request = tl.load(order_ptr + place, mask=inside, other=0)
    length = tl.load(seq_lens_ptr + request // BLOCKS, mask=inside, other=0).to(tl.int32)
    leaf_begin = tl.gather(state, leaf_parent, 0) >> 1
    write_leaves(ranges, inside, place, leaf_begin, length, skips_empty, BATCH)
