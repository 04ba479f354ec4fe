"""Device planner, 6: where each range's items, entries and partial results go.

Items of the large tile shape come first (ITEM_ORDER), the longest first within a shape. A range's
place is the sum over the ranges that come before it, and the place of its results among a query's
is the sum over the ranges above it: each range looks at every other, which spares sorting and
scanning.
"""

from __future__ import annotations

import triton.language as tl
from triton import jit
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@jit
def _cheapest(cost_ptr, chunk_ptr, CANDIDATES: tl.constexpr):
    """Chunk length of the cheapest candidate; of equal ones, the first."""
    candidate = tl.arange(0, CANDIDATES)
    cost = tl.load(cost_ptr + candidate)
    least = tl.reduce(cost, 0, tl.standard._elementwise_min)
    best = tl.where(cost == least, candidate, CANDIDATES - 1)
    return tl.load(chunk_ptr + tl.reduce(best, 0, tl.standard._elementwise_min))


@jit(do_not_specialize=["small_tile", "large_tile"])
def measure_ranges(
    first_ptr,
    range_queries_ptr,
    range_begin_ptr,
    range_end_ptr,
    cost_ptr,
    chunk_ptr,
    range_pieces_ptr,
    range_item_ptr,
    range_entry_ptr,
    range_part_ptr,
    parts_ptr,
    merged_ptr,
    small_tile,
    large_tile,
    BATCH: tl.constexpr,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
    MAX_MERGED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Of each range [2 B]: pieces, first item, first entry, and results of the ranges above it.

    parts [B]: partial results of the request at each position; merged [B]: how many of them its
    leaf's item merges itself (0: the reduction does, or there is one).
    """
    if OVERLAPPED:
        gdc_launch_dependents()
        gdc_wait()
    small_chunk = _cheapest(cost_ptr, chunk_ptr, CANDIDATES)
    large_chunk = _cheapest(cost_ptr + CANDIDATES, chunk_ptr + CANDIDATES, CANDIDATES)

    other = tl.arange(0, 2 * BATCH)
    queries = tl.load(range_queries_ptr + other)
    begin = tl.load(range_begin_ptr + other)
    end = tl.load(range_end_ptr + other)
    first = tl.where(other < BATCH, tl.load(first_ptr + other % BATCH), other - BATCH)
    large = (queries > small_tile).to(tl.int32)
    held = tl.where(large == 1, large_tile, tl.maximum(small_tile, 1))
    tiles = (queries + held - 1) // held
    chunk = tl.where(large == 1, large_chunk, small_chunk)
    pieces = tl.maximum((end - begin + chunk - 1) // chunk, 1)
    pieces = tl.where(queries > 0, pieces, 0)
    length = (end - begin + pieces - 1) // tl.maximum(pieces, 1)
    small_pieces = tl.where(large == 0, pieces, 0)

    mine = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    my_queries = tl.load(range_queries_ptr + mine)
    my_begin = tl.load(range_begin_ptr + mine)
    my_end = tl.load(range_end_ptr + mine)
    is_leaf = mine >= BATCH
    my_first = tl.where(is_leaf, mine - BATCH, tl.load(first_ptr + mine % BATCH))
    my_large = (my_queries > small_tile).to(tl.int32)
    my_chunk = tl.where(my_large == 1, large_chunk, small_chunk)
    my_pieces = tl.maximum((my_end - my_begin + my_chunk - 1) // my_chunk, 1)
    my_pieces = tl.where(my_queries > 0, my_pieces, 0)
    my_length = (my_end - my_begin + my_pieces - 1) // tl.maximum(my_pieces, 1)

    longer = length[None, :] > my_length[:, None]
    as_long = (length[None, :] == my_length[:, None]) & (other[None, :] < mine[:, None])
    same_shape = large[None, :] == my_large[:, None]
    before = (large[None, :] > my_large[:, None]) | (same_shape & (longer | as_long))
    items = tl.where(before, (tiles * pieces)[None, :], 0)
    entries = tl.where(before, (queries * pieces)[None, :], 0)
    tl.store(range_pieces_ptr + mine, my_pieces)
    tl.store(range_item_ptr + mine, tl.reduce(items, 1, tl.standard._sum_combine))
    tl.store(range_entry_ptr + mine, tl.reduce(entries, 1, tl.standard._sum_combine))

    stop = first + queries
    above = (other < BATCH)[None, :] & (end[None, :] <= my_begin[:, None])
    above = above & (first[None, :] <= my_first[:, None])
    above = above & (stop[None, :] >= (my_first + my_queries)[:, None])
    part = tl.reduce(tl.where(above, pieces[None, :], 0), 1, tl.standard._sum_combine)
    tl.store(range_part_ptr + mine, part)
    small_part = tl.reduce(tl.where(above, small_pieces[None, :], 0), 1, tl.standard._sum_combine)

    # A leaf's item of the smallest tile shape runs in the last launch: it merges its query's other
    # results itself, unless one of them comes from the same launch, or they are many.
    parts = part + my_pieces
    alone = (small_part == 0) & (my_pieces == 1) & (my_large == 0)
    merges = alone & (parts > 1) & (parts - 1 <= MAX_MERGED)
    is_request = is_leaf & (my_queries > 0)
    tl.store(parts_ptr + my_first, parts, mask=is_request)
    tl.store(merged_ptr + my_first, tl.where(merges, parts - 1, 0), mask=is_request)
