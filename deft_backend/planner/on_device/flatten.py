"""Device planner, 5 to 7 of `deft-flatten`: the flattened forest in even chunks, cut into tiles.

The policy (``policies/deft_flatten.py``) and its items (``planner/reference.py``). An element is a
node or a leaf, and a slice is what a chunk holds of an element. The queries of a chunk's slices
fill its tiles. A tile reads those slices that one of its queries attends to.

No walk is needed. In depth-first order, the request at a place adds those tokens of its context to
the flattened forest that it does not share with the request before it. So a sum over the places
before gives where a node or a leaf begins. As in ``measure_ranges.py``, everything looks at
everything else instead of sorting: elements, chunks and tiles are few.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton import jit

from deft_backend.planner.on_device.arrays import CANDIDATES, Flat
from deft_backend.planner.on_device.tiles import overlap, sum_of_rows, total
from deft_backend.policies import DeftFlatten, Target
from deft_backend.shapes import MAX_ITEM_TOKENS, MAX_MERGED


class Rule(NamedTuple):
    """Constants: the policy's chunks and the target's tiles."""

    shortest: int  # tokens of a chunk; twice as many at each doubling
    doublings: int  # lengths of chunks that the planner may choose from
    longer: int  # tokens of a chunk, beyond which the programs need not hold all chunks at once
    programs: int  # programs of the masked tile
    # Queries that the small, the largest and the masked tile hold.
    small: int
    largest: int
    masked: int
    held: int  # queries that each tile holds that a chunk may need; `half` is half as many
    half: int
    segments: int  # most segments of an item of the masked tile
    max_merged: int
    candidates: int  # numbers in `Flat.candidate`

    @classmethod
    def of(cls, policy: DeftFlatten, target: Target) -> Rule:
        small, _, masked = target.tile_queries
        shortest, held = policy.chunk_tokens, min(masked, target.largest_tile)
        return cls(
            shortest,
            doublings=max(1, (2 * MAX_ITEM_TOKENS // 3 // shortest).bit_length()),
            longer=policy.longer * shortest,
            programs=target.tile_programs[-1],
            small=small,
            largest=target.largest_tile,
            masked=masked,
            held=held,
            half=max(1, held // 2),
            segments=target.tile_segments[-1],
            max_merged=MAX_MERGED,
            candidates=CANDIDATES,
        )


class Choice(NamedTuple):
    """How the forest is cut. Without room, each request is a chunk of its own."""

    alone: Any
    chunk: Any  # int64: tokens of a chunk
    count: Any  # chunks


class Slices(NamedTuple):
    there: Any
    start: Any
    stop: Any
    is_open: Any  # whether the slice ends where its request's sequence currently ends
    first: Any
    until: Any  # place of the first query, and the place behind the last


@jit
def choice_of(flat, batch, RULE):
    number = tl.load(flat.candidate + tl.arange(0, RULE.candidates))
    best = tl.reduce(number, 0, tl.standard._elementwise_min)
    alone = best == RULE.doublings
    chunk = tl.full([], RULE.shortest, tl.int64) << best
    count = tl.load(flat.count + best)
    return Choice(alone, tl.where(alone, 1 << 32, chunk), tl.where(alone, batch, count))


@jit
def count_tiles(choice, groups):
    last = choice.count - 1
    return tl.load(groups.tile + last) + tl.load(groups.tiles + last)


@jit
def items_of(segments, RULE):
    return (segments + RULE.segments - 1) // RULE.segments


@jit
def slices_of(at, there, number, choice, elements):
    """What the chunks `number` hold of the elements `at`."""
    flat = tl.load(elements.flat + at, mask=there, other=0)
    begin = tl.load(elements.begin + at, mask=there, other=0)
    end = tl.load(elements.end + at, mask=there, other=0)
    first = tl.load(elements.first + at, mask=there, other=0)
    queries = tl.load(elements.queries + at, mask=there, other=0)
    is_leaf = queries == 1
    flat = tl.where(choice.alone, first.to(tl.int64) << 32, flat)
    begin = tl.where(choice.alone, 0, begin)
    # An empty leaf joins the chunk of the token before it.
    joins = (end == begin) & (choice.alone == 0)
    begins = tl.where(joins, tl.maximum(flat - 1, 0), flat)
    ends = tl.maximum(flat + end - begin, begins + 1)
    chunk_begin = number * choice.chunk
    chunk_end = chunk_begin + choice.chunk
    is_last = number == choice.count - 1
    there = (queries > 0) & (is_leaf | (choice.alone == 0))
    there = there & ((begins < chunk_end) | is_last) & (ends > chunk_begin)
    start = (begin + tl.maximum(chunk_begin - flat, 0)).to(tl.int32)
    whole = (ends <= chunk_end) | is_last
    stop = tl.where(whole, end, (begin + chunk_end - flat).to(tl.int32))
    return Slices(there, start, stop, whole & is_leaf, first, first + queries)


@jit(do_not_specialize=["batch", "max_items", "max_entries", "max_segments"])
def flatten_forest(
    flat: Flat,
    batch,
    max_items,
    max_entries,
    max_segments,
    BATCH: tl.constexpr,
    BLOCK: tl.constexpr,
    RULE: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Write `Elements`, BLOCK of them in a program, behind the programs of the candidates.

    A candidate's bounds of items, (item, query) pairs and KV ranges are the policy's. The first
    candidate that fits is chosen; behind the longest chunks comes one that always fits.
    """
    overlap(OVERLAPPED)
    ranges, place = flat.ranges, tl.arange(0, BATCH)
    length = tl.load(ranges.end + BATCH + place, mask=place < batch, other=0)
    cut = tl.load(flat.cut + place, mask=place < batch, other=0)
    added = tl.maximum(length - cut, 0).to(tl.int64)
    token_0 = tl.associative_scan(added, 0, tl.standard._sum_combine) - added - cut
    candidate = tl.program_id(0)
    if candidate <= RULE.doublings:
        chunk = tl.full([], RULE.shortest, tl.int64) << tl.minimum(candidate, RULE.doublings - 1)
        count = tl.maximum((2 * total(added) + chunk) // (2 * chunk), 1)
        groups = tl.full([], 0, tl.int64)
        pairs = tl.full([], 0, tl.int64)
        segments = tl.full([], 0, tl.int64)
        for half in range(0, 2):  # nodes, then leaves
            queries = tl.load(ranges.queries + half * BATCH + place)
            begin = tl.load(ranges.begin + half * BATCH + place)
            end = tl.load(ranges.end + half * BATCH + place)
            first = tl.load(flat.first + place, mask=(queries > 0) & (half == 0), other=0)
            first = tl.where(half == 0, first, place)
            begins = tl.gather(token_0, first, 0) + begin
            last = tl.maximum(begins + end - begin - 1, 0) // chunk
            last = tl.where(queries > 0, tl.minimum(last, count - 1), -1)
            slices = tl.where(queries > 0, last - tl.minimum(begins // chunk, last) + 1, 0)
            met = tl.where(queries == 1, 1, (queries - 1) // RULE.half + 2)
            groups = tl.maximum(groups, tl.reduce(last + 1, 0, tl.standard._elementwise_max))
            pairs += total(slices * queries)
            segments += total(slices * met)
        again = segments // RULE.segments
        fits = (count <= RULE.programs) | (chunk >= RULE.longer) | (candidate == RULE.doublings - 1)
        fits &= tl.maximum(2 * groups, pairs // RULE.held + groups + again) <= max_items
        fits &= (pairs + again * RULE.masked <= max_entries) & (segments <= max_segments)
        fits |= candidate >= RULE.doublings
        tl.store(flat.candidate + candidate, tl.where(fits, candidate, RULE.candidates))
        tl.store(flat.count + candidate, count.to(tl.int32))
    else:
        elements = flat.elements
        number = (candidate - RULE.doublings - 1) * BLOCK + tl.arange(0, BLOCK)
        is_leaf = number >= BATCH
        queries = tl.load(ranges.queries + number)
        there = queries > 0
        first = tl.load(flat.first + number, mask=there & (number < BATCH), other=0)
        first = tl.where(there & is_leaf, number - BATCH, first)
        begin = tl.load(ranges.begin + number)
        # Before an element come the leaves and nodes of earlier places. Of the nodes that begin at
        # its place, the larger ones stand behind the smaller ones.
        other_first = tl.load(flat.first + place, mask=place < batch, other=0)[None, :]
        above = (other_first == first[:, None]) & (is_leaf[:, None] | (place > number[:, None]))
        before = (other_first < first[:, None]) | above
        before = before & (tl.load(ranges.queries + place) > 0)[None, :]
        at = first + sum_of_rows(before.to(tl.int32))
        tl.store(elements.flat + at, tl.gather(token_0, first, 0) + begin, mask=there)
        tl.store(elements.begin + at, begin, mask=there)
        tl.store(elements.end + at, tl.load(ranges.end + number), mask=there)
        tl.store(elements.first + at, first, mask=there)
        tl.store(elements.queries + at, queries, mask=there)


@jit(do_not_specialize=["batch"])
def find_groups(
    flat: Flat,
    batch,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    RULE: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Write `Groups` without `Groups.tile`: BLOCK chunks at a time, from COLUMNS elements."""
    overlap(OVERLAPPED)
    choice, groups = choice_of(flat, batch, RULE), flat.groups
    elements = batch + tl.load(flat.chosen.count)
    for at in range(tl.program_id(0) * BLOCK, choice.count, tl.num_programs(0) * BLOCK):
        number = at + tl.arange(0, BLOCK)
        element = tl.full([BLOCK], 1 << 30, tl.int32)
        first = element
        slices = tl.full([BLOCK], 0, tl.int32)
        until = slices
        for begin in range(0, elements, COLUMNS):
            column = (begin + tl.arange(0, COLUMNS))[None, :]
            held = slices_of(column, column < elements, number[:, None], choice, flat.elements)
            least = tl.reduce(
                tl.where(held.there, column, 1 << 30), 1, tl.standard._elementwise_min
            )
            element = tl.minimum(element, least)
            least = tl.where(held.there, held.first, 1 << 30)
            first = tl.minimum(first, tl.reduce(least, 1, tl.standard._elementwise_min))
            most = tl.where(held.there, held.until, 0)
            until = tl.maximum(until, tl.reduce(most, 1, tl.standard._elementwise_max))
            slices += sum_of_rows(held.there.to(tl.int32))
        queries = until - first
        fits = tl.where(slices > 1, RULE.masked, RULE.largest)
        there = number < choice.count
        tl.store(groups.element + number, element, mask=there)
        tl.store(groups.slices + number, slices, mask=there)
        tl.store(groups.first + number, first, mask=there)
        tl.store(groups.queries + number, queries, mask=there)
        tl.store(groups.tiles + number, (queries + fits - 1) // fits, mask=there)


@jit(do_not_specialize=["batch"])
def cut_groups(
    flat: Flat,
    batch,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    RULE: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Write `Groups.tile`, and `Tiles` up to `segments`: BLOCK tiles of a chunk at a time."""
    overlap(OVERLAPPED)
    choice, groups, tiles = choice_of(flat, batch, RULE), flat.groups, flat.tiles
    column = tl.arange(0, COLUMNS)
    for number in range(tl.program_id(0), choice.count, tl.num_programs(0)):
        before = tl.full([COLUMNS], 0, tl.int32)
        for begin in range(0, number, COLUMNS):
            at = begin + column
            before += tl.load(groups.tiles + at, mask=at < number, other=0)
        first_tile = total(before)
        tl.store(groups.tile + number, first_tile)
        element = tl.load(groups.element + number)
        slices = tl.load(groups.slices + number)
        group_first = tl.load(groups.first + number)
        group_queries = tl.load(groups.queries + number)
        many = tl.load(groups.tiles + number)
        for at in range(0, many, BLOCK):
            tile = at + tl.arange(0, BLOCK)
            first = group_first + tile * group_queries // many
            until = group_first + (tile + 1) * group_queries // many
            segments = tl.full([BLOCK], 0, tl.int32)
            tokens = segments
            for begin in range(0, slices, COLUMNS):
                inside = begin + column < slices
                held = slices_of(element + begin + column, inside, number, choice, flat.elements)
                meets = held.there & (held.first < until[:, None]) & (held.until > first[:, None])
                segments += sum_of_rows(meets.to(tl.int32))
                tokens += sum_of_rows(tl.where(meets, held.stop - held.start, 0))
            there = tile < many
            place = tl.where(slices > 1, 2, (until - first <= RULE.small).to(tl.int32))
            tile += first_tile
            tl.store(tiles.group + tile, number, mask=there)
            tl.store(tiles.first + tile, first, mask=there)
            tl.store(tiles.queries + tile, until - first, mask=there)
            tl.store(tiles.place + tile, place, mask=there)
            tl.store(tiles.tokens + tile, tokens, mask=there)
            tl.store(tiles.segments + tile, segments, mask=there)
