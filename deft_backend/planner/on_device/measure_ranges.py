"""Device planner, 6: where each range's items, entries and partial results go.

Items of the large tile come first (ITEM_ORDER), and the longest come first within a tile shape. A
range's items follow those of all ranges before it, so a sum over these ranges gives the first item.
Among a query's partial results, a range's own follow those of the ranges above it. Each range looks
at every other range, so the kernel neither sorts nor scans.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton import jit
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deft_backend.planner.on_device.arrays import Candidates, Places, Ranges, Results
from deft_backend.planner.on_device.tiles import tiles_of


class Cut(NamedTuple):
    """Ranges, cut into chunks."""

    queries: Any
    begin: Any
    end: Any
    first: Any
    """Position of the first query."""
    is_large: Any
    """1 for large tiles, 0 for small ones."""
    tiles: Any
    pieces: Any
    length: Any
    """Tokens of the longest chunk."""


@jit
def _cheapest(candidates, shape, CANDIDATES: tl.constexpr):
    """Chunk length of a tile shape's cheapest candidate; of equal ones, the first."""
    candidate = tl.arange(0, CANDIDATES)
    cost = tl.load(candidates.cost + shape * CANDIDATES + candidate)
    least = tl.reduce(cost, 0, tl.standard._elementwise_min)
    best = tl.where(cost == least, candidate, CANDIDATES - 1)
    best = tl.reduce(best, 0, tl.standard._elementwise_min)
    return tl.load(candidates.chunk + shape * CANDIDATES + best)


@jit
def _cut(
    at, first_ptr, ranges, small_chunk, large_chunk, small_tile, large_tile, BATCH: tl.constexpr
):
    """Ranges, cut into chunks."""
    queries = tl.load(ranges.queries + at)
    begin = tl.load(ranges.begin + at)
    end = tl.load(ranges.end + at)
    first = tl.where(at < BATCH, tl.load(first_ptr + at % BATCH), at - BATCH)
    is_large, tiles = tiles_of(queries, small_tile, large_tile)
    is_large = is_large.to(tl.int32)
    chunk = tl.where(is_large == 1, large_chunk, small_chunk)
    pieces = tl.maximum((end - begin + chunk - 1) // chunk, 1)
    pieces = tl.where(queries > 0, pieces, 0)
    length = (end - begin + pieces - 1) // tl.maximum(pieces, 1)
    return Cut(queries, begin, end, first, is_large, tiles, pieces, length)


@jit(do_not_specialize=["small_tile", "large_tile"])
def measure_ranges(
    first_ptr,
    ranges: Ranges,
    candidates: Candidates,
    places: Places,
    results: Results,
    small_tile,
    large_tile,
    BATCH: tl.constexpr,
    BLOCK: tl.constexpr,
    CANDIDATES: tl.constexpr,
    MAX_MERGED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Write `Places` and `Results`, BLOCK ranges in each program."""
    if OVERLAPPED:
        gdc_launch_dependents()
        gdc_wait()
    small_chunk = _cheapest(candidates, 0, CANDIDATES)
    large_chunk = _cheapest(candidates, 1, CANDIDATES)
    other_at = tl.arange(0, 2 * BATCH)
    other = _cut(
        other_at, first_ptr, ranges, small_chunk, large_chunk, small_tile, large_tile, BATCH
    )
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cut = _cut(at, first_ptr, ranges, small_chunk, large_chunk, small_tile, large_tile, BATCH)

    longer = other.length[None, :] > cut.length[:, None]
    as_long = (other.length[None, :] == cut.length[:, None]) & (other_at[None, :] < at[:, None])
    same_shape = other.is_large[None, :] == cut.is_large[:, None]
    before = other.is_large[None, :] > cut.is_large[:, None]
    before = before | (same_shape & (longer | as_long))
    items = tl.where(before, (other.tiles * other.pieces)[None, :], 0)
    entries = tl.where(before, (other.queries * other.pieces)[None, :], 0)
    tl.store(places.pieces + at, cut.pieces)
    tl.store(places.item + at, tl.reduce(items, 1, tl.standard._sum_combine))
    tl.store(places.entry + at, tl.reduce(entries, 1, tl.standard._sum_combine))

    above = (other_at < BATCH)[None, :] & (other.end[None, :] <= cut.begin[:, None])
    above = above & (other.first[None, :] <= cut.first[:, None])
    above = above & ((other.first + other.queries)[None, :] >= (cut.first + cut.queries)[:, None])
    part = tl.reduce(tl.where(above, other.pieces[None, :], 0), 1, tl.standard._sum_combine)
    tl.store(places.part + at, part)
    small_pieces = tl.where(other.is_large == 0, other.pieces, 0)
    small_part = tl.reduce(tl.where(above, small_pieces[None, :], 0), 1, tl.standard._sum_combine)

    # A leaf's item of the small tile runs in the last launch. So it merges its query's other
    # results, unless there are many, or one of them comes from the same launch.
    parts = part + cut.pieces
    alone = (small_part == 0) & (cut.pieces == 1) & (cut.is_large == 0)
    merges = alone & (parts > 1) & (parts - 1 <= MAX_MERGED)
    is_request = (at >= BATCH) & (cut.queries > 0)
    tl.store(results.parts + cut.first, parts, mask=is_request)
    tl.store(results.merged + cut.first, tl.where(merges, parts - 1, 0), mask=is_request)
