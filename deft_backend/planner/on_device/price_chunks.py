"""Device planner, 5: what every candidate for the length of chunks is expected to cost.

The same estimate as the host's (``policies/range_choice.py``), one program a tile shape and
candidate: items of a shape run in rounds of as many as there are programs.
"""

from __future__ import annotations

import triton.language as tl
from triton import jit
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@jit(
    do_not_specialize=[
        "small_tile",
        "large_tile",
        "max_entries",
        "max_items",
        "small_programs",
        "large_programs",
        "block",
    ]
)
def price_chunks(
    range_queries_ptr,
    range_begin_ptr,
    range_end_ptr,
    pieces_ptr,
    cost_ptr,
    chunk_ptr,
    small_tile,
    large_tile,
    max_entries,
    max_items,
    small_programs,
    large_programs,
    sms,
    small_item_ns,
    small_token_ns,
    large_item_ns,
    large_token_ns,
    partial_ns,
    reduce_ns,
    transfer_ns,
    block,
    BATCH: tl.constexpr,
    CANDIDATES: tl.constexpr,
    MAX_MERGED: tl.constexpr,
    ALONE: tl.constexpr,
    HIDDEN: tl.constexpr,
    EXPOSED: tl.constexpr,
    UNEVEN: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """cost, chunk [2, CANDIDATES]: nanoseconds, and tokens a chunk, for `pieces` of the longest.

    Costs here are of items with every program of a shape busy. A candidate whose items or partial
    results would not fit the plan's arrays, each shape taking half of what is left, costs infinity;
    the first, one piece, always fits.
    """
    if OVERLAPPED:
        gdc_launch_dependents()
        gdc_wait()
    candidate = tl.program_id(0)
    shape = tl.program_id(1)
    which = tl.arange(0, 2 * BATCH)
    all_queries = tl.load(range_queries_ptr + which)
    all_large = all_queries > small_tile
    all_held = tl.where(all_large, large_tile, tl.maximum(small_tile, 1))
    all_tiles = (all_queries + all_held - 1) // all_held
    spare_entries = max_entries - tl.reduce(all_queries, 0, tl.standard._sum_combine)
    spare_items = max_items - tl.reduce(all_tiles, 0, tl.standard._sum_combine)

    mine = (all_queries > 0) & (all_large == (shape == 1))
    queries = tl.where(mine, all_queries, 0)
    tiles = tl.where(mine, all_tiles, 0)
    begin = tl.load(range_begin_ptr + which)
    all_tokens = tl.where(all_queries > 0, tl.load(range_end_ptr + which) - begin, 0)
    tokens = tl.where(mine, all_tokens, 0)
    longest = tl.reduce(tokens, 0, tl.standard._elementwise_max)
    pieces = tl.load(pieces_ptr + candidate)
    share = (longest + pieces * block - 1) // (pieces * block)
    chunk = tl.maximum(block, share * block)
    parts = tl.maximum((tokens + chunk - 1) // chunk, 1)
    cut = parts > 1

    items = tl.reduce(tiles * parts, 0, tl.standard._sum_combine)
    more_items = items - tl.reduce(tiles, 0, tl.standard._sum_combine)
    split_results = tl.reduce(tl.where(cut, queries * parts, 0), 0, tl.standard._sum_combine)
    more_entries = tl.reduce(queries * (parts - 1), 0, tl.standard._sum_combine)
    most = tl.reduce(tl.where(mine, parts, 1), 0, tl.standard._elementwise_max)
    read_tokens = tiles.to(tl.float32) * tokens.to(tl.float32)
    read = tl.reduce(read_tokens, 0, tl.standard._sum_combine)
    stored = tl.reduce(tokens.to(tl.float32), 0, tl.standard._sum_combine)
    # About the time that items of the small shape take.
    is_small = (all_queries > 0) & (all_large == 0)
    small_tokens = tl.where(is_small, all_tokens, 0).to(tl.float32)
    beside = tl.reduce(small_tokens, 0, tl.standard._sum_combine) * transfer_ns + small_item_ns
    beside = tl.where(tl.reduce(is_small.to(tl.int32), 0, tl.standard._sum_combine) > 0, beside, 0)

    item_ns = tl.where(shape == 1, large_item_ns, small_item_ns)
    token_ns = tl.where(shape == 1, large_token_ns, small_token_ns)
    programs = tl.where(shape == 1, large_programs, small_programs)
    leaves_room = (shape == 1) & (2 * items <= programs)
    token_ns = tl.where(leaves_room, token_ns * ALONE, token_ns)
    rounds = ((items + programs - 1) // programs).to(tl.float32)
    busy = rounds * (item_ns + read / tl.maximum(items, 1).to(tl.float32) * token_ns)
    alone = item_ns + tl.minimum(chunk, longest).to(tl.float32) * token_ns
    # About the larger, as on the host: (1 + share^8)^(1/8) times it.
    own = tl.maximum(busy, alone)
    transfer = stored * transfer_ns
    larger = tl.maximum(own, transfer)
    share = tl.minimum(own, transfer) / larger
    share = share * share * share * share
    cost = larger * tl.sqrt(tl.sqrt(tl.sqrt(1.0 + share * share)))
    cost -= tl.where(leaves_room, tl.minimum(cost, HIDDEN * beside), 0.0)
    cost += split_results.to(tl.float32) * partial_ns
    spread = items.to(tl.float32)
    fullest = tl.ceil(spread / sms) * sms
    uneven = (items > sms) & (items <= programs)
    small_cost = EXPOSED * spread * item_ns / programs.to(tl.float32)
    small_cost += tl.where(uneven, UNEVEN * transfer * (fullest / spread - 1.0), 0.0)
    cost += tl.where(shape == 0, small_cost, 0.0)
    # Few results are merged one after another where the leaf is read, many in stage 2.
    reduced = (shape == 0) | (most > MAX_MERGED)
    in_stage_2 = reduce_ns + most.to(tl.float32) * reduce_ns / (16 * MAX_MERGED)
    at_leaves = (most - 1).to(tl.float32) * reduce_ns / (2 * MAX_MERGED)
    cost += tl.where(reduced, tl.where(most > 1, in_stage_2, 0.0), at_leaves)

    fits = (2 * more_entries <= spare_entries) & (2 * more_items <= spare_items)
    useful = (items <= 8 * programs) | (most == 1)
    cost = tl.where((candidate == 0) | (fits & useful), cost, float("inf"))
    tl.store(cost_ptr + shape * CANDIDATES + candidate, cost)
    tl.store(chunk_ptr + shape * CANDIDATES + candidate, chunk)
