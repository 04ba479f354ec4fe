"""Device planner, 6: where each range's items, entries and partial results go.

Items of the large tile come first (ITEM_ORDER), and the longest first within a tile shape: a sum
over the ranges before a range gives its first item. Among a query's partial results, a range's own
follow those of the ranges above it. Each range looks at every other range, so the kernel neither
sorts nor scans. Only nodes lie above a range, and few nodes have ranges.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton import jit

from deft_backend.planner.on_device.arrays import Candidates, Chosen, Places, Ranges, Results
from deft_backend.planner.on_device.tiles import (
    Estimate,
    chunk_at,
    overlap,
    parts_of,
    sizes_of,
    sum_of_rows,
    tiles_of,
)


class Range(NamedTuple):
    """Ranges before they are cut."""

    queries: Any
    begin: Any
    end: Any
    first: Any  # place of the first query
    number: Any  # nodes count before leaves, and each in order of place
    length: Any  # tokens of the first query's request


class Lengths(NamedTuple):
    small: Any
    large: Any  # most tokens of a chunk, by tile shape; nanoseconds for the rule ``scheduled``
    block: Any
    estimate: Any


class Cut(NamedTuple):
    is_large: Any
    tiles: Any
    num_chunks: Any
    rank: Any  # tokens of the longest chunk; at most 0, and in the same order, if the tile is small


@jit
def _cheapest(candidates, shape, CANDIDATES):
    """Chunk length of a tile shape's cheapest candidate; of equal ones, the first."""
    candidate = tl.arange(0, CANDIDATES)
    cost = tl.load(candidates.cost + shape * CANDIDATES + candidate)
    least = tl.reduce(cost, 0, tl.standard._elementwise_min)
    best = tl.where(cost == least, candidate, CANDIDATES - 1)
    best = tl.reduce(best, 0, tl.standard._elementwise_min)
    return tl.load(candidates.chunk + shape * CANDIDATES + best)


@jit
def _read_leaves(place, batch, ranges, BATCH):
    there = place < batch
    queries = tl.load(ranges.queries + BATCH + place, mask=there, other=0)
    begin = tl.load(ranges.begin + BATCH + place, mask=there, other=0)
    end = tl.load(ranges.end + BATCH + place, mask=there, other=0)
    return Range(queries, begin, end, place, BATCH + place, end)


@jit
def _read_nodes(number, count, chosen, ranges, BATCH):
    there = (number >= 0) & (number < count)
    queries = tl.load(chosen.queries + number, mask=there, other=0)
    begin = tl.load(chosen.begin + number, mask=there, other=0)
    end = tl.load(chosen.end + number, mask=there, other=0)
    first = tl.load(chosen.first + number, mask=there, other=0)
    length = tl.load(ranges.end + BATCH + first, mask=there, other=0)
    return Range(queries, begin, end, first, number, length)


@jit
def _cut(range_, lengths, small_tile, large_tile, BATCH, CHUNKS):
    is_large, tiles = tiles_of(range_.queries, small_tile, large_tile)
    chunk = tl.where(is_large, lengths.large, lengths.small)
    tokens = range_.end - range_.begin
    if CHUNKS == "absolute":  # without a request's last chunk
        last = tl.maximum(range_.end - 1, range_.begin)
        num_chunks = chunk_at(last, range_.length, chunk)
        num_chunks -= chunk_at(range_.begin, range_.length, chunk)
        num_chunks += (range_.number < BATCH).to(tl.int32)
    else:
        sizes = sizes_of(tokens, is_large, lengths.estimate, CHUNKS)
        num_chunks = parts_of(sizes, tokens, chunk, lengths.block, CHUNKS)
    num_chunks = tl.where(range_.queries > 0, num_chunks, 0)
    length = (tokens + num_chunks - 1) // tl.maximum(num_chunks, 1)
    return Cut(is_large, tiles, num_chunks, tl.where(is_large, length, length - 2147483647))


@jit
def _is_before(other, other_cut, range_, cut):
    """[ranges, others]: whether the other range's items come before the range's."""
    rank = cut.rank[:, None]
    other_rank = other_cut.rank[None, :]
    earlier = other.number[None, :] < range_.number[:, None]
    return (other_rank > rank) | ((other_rank == rank) & earlier)


@jit(do_not_specialize=["batch", "small_tile", "large_tile", "block", "ordered_tile"])
def measure_ranges(
    ranges: Ranges,
    chosen: Chosen,
    candidates: Candidates,
    places: Places,
    results: Results,
    batch,
    small_tile,
    large_tile,
    block,
    ordered_tile,
    estimate: Estimate,
    BATCH: tl.constexpr,
    BLOCK: tl.constexpr,
    LEAVES: tl.constexpr,
    NODES: tl.constexpr,
    CANDIDATES: tl.constexpr,
    MAX_MERGED: tl.constexpr,
    CHUNKS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Write `Places` of all ranges and `Results`, BLOCK ranges in each program.

    The first ``ceil(batch / BLOCK)`` programs measure leaves, the others nodes. A program compares
    its ranges with LEAVES leaves at a time, and with NODES nodes. `block` is the length of a KV
    block; by the rule ``absolute``, of the first chunks. By that rule, ranges of up to
    `ordered_tile` queries take the ordered tile, whose items follow the large tile's.
    """
    overlap(OVERLAPPED)
    leaf_programs = (batch + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    node = (program - leaf_programs) * BLOCK  # negative: the program measures leaves
    if node >= tl.load(chosen.count, mask=node >= 0, other=node + 1):
        return
    count = tl.load(chosen.count)
    if CHUNKS == "absolute":
        held, small_chunk, large_chunk = ordered_tile, block, block
    else:
        held = small_tile
        small_chunk = _cheapest(candidates, 0, CANDIDATES)
        large_chunk = _cheapest(candidates, 1, CANDIDATES)
    lengths = Lengths(small_chunk, large_chunk, block, estimate)
    lane = tl.arange(0, BLOCK)
    leaves = _read_leaves(program * BLOCK + lane, batch, ranges, BATCH)
    nodes = _read_nodes(node + lane, count, chosen, ranges, BATCH)
    is_leaf = leaves.first < batch
    mine = Range(
        tl.where(is_leaf, leaves.queries, nodes.queries),
        tl.where(is_leaf, leaves.begin, nodes.begin),
        tl.where(is_leaf, leaves.end, nodes.end),
        tl.where(is_leaf, leaves.first, nodes.first),
        tl.where(is_leaf, leaves.number, nodes.number),
        tl.where(is_leaf, leaves.length, nodes.length),
    )
    cut = _cut(mine, lengths, held, large_tile, BATCH, CHUNKS)

    before_leaves = tl.full([BLOCK, LEAVES], 0, tl.int32)
    for begin in range(0, batch, LEAVES):
        other = _read_leaves(begin + tl.arange(0, LEAVES), batch, ranges, BATCH)
        other_cut = _cut(other, lengths, held, large_tile, BATCH, CHUNKS)
        before = _is_before(other, other_cut, mine, cut)
        before_leaves += tl.where(before, other_cut.num_chunks[None, :], 0)
    item = sum_of_rows(before_leaves)
    entry = item
    part = tl.full([BLOCK], 0, tl.int32)
    small_part = tl.full([BLOCK], 0, tl.int32)
    for begin in range(0, count, NODES):
        other = _read_nodes(begin + tl.arange(0, NODES), count, chosen, ranges, BATCH)
        other_cut = _cut(other, lengths, held, large_tile, BATCH, CHUNKS)
        before = _is_before(other, other_cut, mine, cut)
        num_chunks = other_cut.num_chunks
        item += sum_of_rows(tl.where(before, (other_cut.tiles * num_chunks)[None, :], 0))
        entry += sum_of_rows(tl.where(before, (other.queries * num_chunks)[None, :], 0))
        above = other.end[None, :] <= mine.begin[:, None]
        above = above & (other.first[None, :] <= mine.first[:, None])
        stop = mine.first + mine.queries
        above = above & ((other.first + other.queries)[None, :] >= stop[:, None])
        part += sum_of_rows(tl.where(above, num_chunks[None, :], 0))
        num_small_chunks = tl.where(other_cut.is_large, 0, num_chunks)
        small_part += sum_of_rows(tl.where(above, num_small_chunks[None, :], 0))
    place = tl.load(chosen.place + nodes.number, mask=nodes.queries > 0, other=0)
    at = tl.where(is_leaf, leaves.number, place)
    there = is_leaf | (mine.queries > 0)
    tl.store(places.num_chunks + at, cut.num_chunks, mask=there)
    tl.store(places.item + at, item, mask=there)
    tl.store(places.entry + at, entry, mask=there)
    tl.store(places.part + at, part, mask=there)

    # A leaf's item of the small tile runs in the last launch. So it merges its query's other
    # results, unless there are many, or one of them comes from the same launch.
    parts = part + cut.num_chunks
    alone = (small_part == 0) & (cut.num_chunks == 1) & (cut.is_large == 0)
    if CHUNKS == "absolute":
        parts += 1
        alone = is_leaf & (small_tile >= 1)
    merges = alone & (parts > 1) & (parts - 1 <= MAX_MERGED)
    tl.store(results.parts + mine.first, parts, mask=is_leaf)
    tl.store(results.merged + mine.first, tl.where(merges, parts - 1, 0), mask=is_leaf)
