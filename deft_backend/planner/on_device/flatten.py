"""Device planner, 5 to 9 of `deft-flatten`: the flattened forest in even chunks.

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
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deft_backend.planner import encoding
from deft_backend.planner.device_plan import ItemArrays, ReduceArrays
from deft_backend.planner.on_device.arrays import CANDIDATES, Counters, Flat
from deft_backend.planner.on_device.tiles import total
from deft_backend.planner.on_device.write_plan import (
    Counts,
    count_plan,
    slots_of,
    write_counts,
    write_reduction,
)
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
        """The constants of a policy and a target."""
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


class Entries(NamedTuple):
    """What chunks have for queries."""

    tile: Any
    items: Any  # items of the tile; 0 if the chunk has nothing for the query
    is_small: Any
    is_lone: Any  # whether the query has an item of the small tile to itself


@jit
def _sum(values):
    return tl.reduce(values, 1, tl.standard._sum_combine)


@jit
def _choice_of(flat, batch, RULE):
    number = tl.load(flat.candidate + tl.arange(0, RULE.candidates))
    best = tl.reduce(number, 0, tl.standard._elementwise_min)
    alone = best == RULE.doublings
    chunk = tl.full([], RULE.shortest, tl.int64) << best
    count = tl.load(flat.count + best)
    return Choice(alone, tl.where(alone, 1 << 32, chunk), tl.where(alone, batch, count))


@jit
def _num_tiles(choice, groups):
    last = choice.count - 1
    return tl.load(groups.tile + last) + tl.load(groups.tiles + last)


@jit
def _items_of(segments, RULE):
    return (segments + RULE.segments - 1) // RULE.segments


@jit
def _slices_of(at, there, number, choice, elements):
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


@jit
def _entries_of(place, number, there, flat, RULE):
    """What the chunks `number` have for the queries at places."""
    groups, tiles = flat.groups, flat.tiles
    at = place - tl.load(groups.first + number, mask=there, other=0)
    queries = tl.load(groups.queries + number, mask=there, other=0)
    there = (at >= 0) & (at < queries)
    many = tl.load(groups.tiles + number, mask=there, other=1)
    tile = tl.load(groups.tile + number, mask=there, other=0)
    tile += ((at + 1) * many - 1) // tl.maximum(queries, 1)
    items = _items_of(tl.load(tiles.segments + tile, mask=there, other=0), RULE)
    is_small = there & (tl.load(tiles.place + tile, mask=there, other=0) == 1)
    is_lone = is_small & (tl.load(tiles.queries + tile, mask=there, other=0) == 1)
    return Entries(tile, items, is_small.to(tl.int32), is_lone.to(tl.int32))


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
    if OVERLAPPED:
        gdc_launch_dependents()
        gdc_wait()
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
        at = first + _sum(before.to(tl.int32))
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
    if OVERLAPPED:
        gdc_launch_dependents()
        gdc_wait()
    choice, groups = _choice_of(flat, batch, RULE), flat.groups
    elements = batch + tl.load(flat.chosen.count)
    for at in range(tl.program_id(0) * BLOCK, choice.count, tl.num_programs(0) * BLOCK):
        number = at + tl.arange(0, BLOCK)
        element = tl.full([BLOCK], 1 << 30, tl.int32)
        first = element
        slices = tl.full([BLOCK], 0, tl.int32)
        until = slices
        for begin in range(0, elements, COLUMNS):
            column = (begin + tl.arange(0, COLUMNS))[None, :]
            held = _slices_of(column, column < elements, number[:, None], choice, flat.elements)
            least = tl.reduce(
                tl.where(held.there, column, 1 << 30), 1, tl.standard._elementwise_min
            )
            element = tl.minimum(element, least)
            least = tl.where(held.there, held.first, 1 << 30)
            first = tl.minimum(first, tl.reduce(least, 1, tl.standard._elementwise_min))
            most = tl.where(held.there, held.until, 0)
            until = tl.maximum(until, tl.reduce(most, 1, tl.standard._elementwise_max))
            slices += _sum(held.there.to(tl.int32))
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
    if OVERLAPPED:
        gdc_launch_dependents()
        gdc_wait()
    choice, groups, tiles = _choice_of(flat, batch, RULE), flat.groups, flat.tiles
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
                held = _slices_of(element + begin + column, inside, number, choice, flat.elements)
                meets = held.there & (held.first < until[:, None]) & (held.until > first[:, None])
                segments += _sum(meets.to(tl.int32))
                tokens += _sum(tl.where(meets, held.stop - held.start, 0))
            there = tile < many
            place = tl.where(slices > 1, 2, (until - first <= RULE.small).to(tl.int32))
            tile += first_tile
            tl.store(tiles.group + tile, number, mask=there)
            tl.store(tiles.first + tile, first, mask=there)
            tl.store(tiles.queries + tile, until - first, mask=there)
            tl.store(tiles.place + tile, place, mask=there)
            tl.store(tiles.tokens + tile, tokens, mask=there)
            tl.store(tiles.segments + tile, segments, mask=there)


@jit
def _read_keys(tile, there, tiles):
    """By which tiles are ordered: their shape, then the longest first."""
    place = tl.load(tiles.place + tile, mask=there, other=0)
    return (place.to(tl.int64) << 32) - tl.load(tiles.tokens + tile, mask=there, other=0)


@jit(do_not_specialize=["batch"])
def measure_tiles(
    flat: Flat,
    batch,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    RULE: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Write the rest of `Tiles`, and `Results`.

    The first ``ceil(batch / BLOCK)`` programs count the results of as many queries; the others
    compare tiles with all other tiles.
    """
    if OVERLAPPED:
        gdc_launch_dependents()
        gdc_wait()
    choice, tiles, results = _choice_of(flat, batch, RULE), flat.tiles, flat.results
    query_programs = (batch + BLOCK - 1) // BLOCK
    program = tl.program_id(0)
    if program < query_programs:
        place = program * BLOCK + tl.arange(0, BLOCK)
        parts = tl.full([BLOCK], 0, tl.int32)
        small = parts
        lone = parts
        for begin in range(0, choice.count, COLUMNS):
            number = (begin + tl.arange(0, COLUMNS))[None, :]
            found = _entries_of(place[:, None], number, number < choice.count, flat, RULE)
            parts += _sum(found.items)
            small += _sum(found.is_small)
            lone += _sum(found.is_lone)
        merges = (small == 1) & (lone == 1) & (parts > 1) & (parts <= RULE.max_merged + 1)
        tl.store(results.parts + place, parts, mask=place < batch)
        tl.store(results.merged + place, tl.where(merges, parts - 1, 0), mask=place < batch)
    else:
        num_tiles = _num_tiles(choice, flat.groups)
        step = (tl.num_programs(0) - query_programs) * BLOCK
        for at in range((program - query_programs) * BLOCK, num_tiles, step):
            tile = at + tl.arange(0, BLOCK)
            there = tile < num_tiles
            key = _read_keys(tile, there, tiles)[:, None]
            item = tl.full([BLOCK], 0, tl.int32)
            entry = item
            segment = item
            for begin in range(0, num_tiles, COLUMNS):
                other = begin + tl.arange(0, COLUMNS)
                inside = other < num_tiles
                other_key = _read_keys(other, inside, tiles)[None, :]
                before = (other_key == key) & (other[None, :] < tile[:, None])
                before = ((other_key < key) | before) & inside[None, :]
                segments = tl.load(tiles.segments + other, mask=inside, other=0)
                items = _items_of(segments, RULE)
                entries = items * tl.load(tiles.queries + other, mask=inside, other=0)
                item += _sum(tl.where(before, items[None, :], 0))
                entry += _sum(tl.where(before, entries[None, :], 0))
                segment += _sum(tl.where(before, segments[None, :], 0))
            tl.store(tiles.item + tile, item, mask=there)
            tl.store(tiles.entry + tile, entry, mask=there)
            tl.store(tiles.segment + tile, segment, mask=there)


@jit
def _write_entries(place, slots, choice, flat, items, batch, COLUMNS, RULE):
    """Write the entries of the queries at places, in the order of the context."""
    DIRECT: tl.constexpr = encoding.DIRECT
    MERGES: tl.constexpr = encoding.MERGES
    inside, tiles = place < batch, flat.tiles
    query = tl.load(flat.order + place, mask=inside, other=0)[:, None]
    parts = tl.load(flat.results.parts + place, mask=inside, other=0)[:, None]
    merged = tl.load(flat.results.merged + place, mask=inside, other=0)[:, None]
    first = tl.gather(slots.first, tl.where(inside, place, 0), 0)
    slot = first[:, None]
    whole = tl.where(parts == 1, DIRECT, MERGES - slot)
    for begin in range(0, choice.count, COLUMNS):
        number = (begin + tl.arange(0, COLUMNS))[None, :]
        there = inside[:, None] & (number < choice.count)
        found = _entries_of(place[:, None], number, there, flat, RULE)
        itself = (parts == 1) | (found.is_lone * merged > 0)  # whether it writes the output
        results = tl.where(itself, 0, found.items)
        before = slot + tl.associative_scan(results, 1, tl.standard._sum_combine) - results
        slot += _sum(results)[:, None]
        is_entry = found.items > 0
        entry = tl.load(tiles.entry + found.tile, mask=is_entry, other=0) + place[:, None]
        entry -= tl.load(tiles.first + found.tile, mask=is_entry, other=0)
        held = tl.load(tiles.queries + found.tile, mask=is_entry, other=0)
        for item in range(0, tl.reduce(found.items, None, tl.standard._elementwise_max)):
            at = entry + item * held
            tl.store(items.entry_query + at, query, mask=item < found.items)
            result = tl.where(itself, whole, before + item)
            tl.store(items.entry_slot + at, result, mask=item < found.items)


@jit
def _write_tile(tile, choice, flat, table_rows, segment_table, items, BLOCKS, COLUMNS, RULE):
    """Write the items and the segments of a tile."""
    OPEN_END: tl.constexpr = encoding.OPEN_END
    SPAN_SHIFT: tl.constexpr = encoding.SPAN_SHIFT
    groups, tiles = flat.groups, flat.tiles
    number = tl.load(tiles.group + tile)
    element = tl.load(groups.element + number)
    slices = tl.load(groups.slices + number)
    first = tl.load(tiles.first + tile)
    queries = tl.load(tiles.queries + tile)
    item = tl.load(tiles.item + tile)
    entry = tl.load(tiles.entry + tile)
    segment = tl.load(tiles.segment + tile)
    is_small = tl.load(tiles.place + tile) == 1
    merged = tl.load(flat.results.merged + first, mask=queries == 1, other=0)
    before = 0
    for begin in range(0, slices, COLUMNS):
        at = begin + tl.arange(0, COLUMNS)
        held = _slices_of(element + at, at < slices, number, choice, flat.elements)
        meets = held.there & (held.first < first + queries) & (held.until > first)
        met = meets.to(tl.int32)
        rank = before + tl.associative_scan(met, 0, tl.standard._sum_combine) - met
        before += total(met)
        request = tl.load(flat.order + held.first, mask=meets, other=0) // BLOCKS
        table_row = tl.load(table_rows + request, mask=meets, other=0).to(tl.int32)
        stop = tl.where(held.is_open, OPEN_END, held.stop)
        span = tl.minimum(held.until - first, queries) << SPAN_SHIFT
        span = tl.where(is_small, merged, span | tl.maximum(held.first - first, 0))
        tl.store(items.segment_request + segment + rank, request, mask=meets)
        tl.store(segment_table + segment + rank, table_row, mask=meets)
        tl.store(items.segment_start + segment + rank, held.start, mask=meets)
        tl.store(items.segment_end + segment + rank, stop, mask=meets)
        tl.store(items.segment_span + segment + rank, span, mask=meets)
        part = rank // RULE.segments
        begins = meets & (rank % RULE.segments == 0)
        tl.store(items.item_segment_ptr + item + part, segment + rank, mask=begins)
        tl.store(items.item_query_ptr + item + part, entry + part * queries, mask=begins)


@jit
def _write_totals(choice, flat, items, counters, batch, BATCH, BLOCKS, COLUMNS, RULE, TIMED):
    """Write how much there is of everything, and the counters."""
    tiles, num_tiles = flat.tiles, _num_tiles(choice, flat.groups)
    none = tl.full([COLUMNS], 0, tl.int32)
    large, single, every, entries, segments = none, none, none, none, none
    loaded = none.to(tl.int64)
    for begin in range(0, num_tiles, COLUMNS):
        tile = begin + tl.arange(0, COLUMNS)
        there = tile < num_tiles
        place = tl.load(tiles.place + tile, mask=there, other=0)
        of_tile = tl.load(tiles.segments + tile, mask=there, other=0)
        held = _items_of(of_tile, RULE)
        large += tl.where(place == 0, held, 0)
        single += tl.where(place < 2, held, 0)
        every += held
        entries += held * tl.load(tiles.queries + tile, mask=there, other=0)
        segments += of_tile
        loaded += tl.load(tiles.tokens + tile, mask=there, other=0)
    counts = Counts(total(every), total(entries), total(large), total(single), total(segments))
    write_counts(items, counts)
    count_plan(counters, flat.ranges, total(loaded), batch, BATCH, BLOCKS, TIMED)


@jit(do_not_specialize=["batch"])
def write_flattened(
    flat: Flat,
    table_rows_ptr,
    segment_table_ptr,
    items: ItemArrays,
    reduction: ReduceArrays,
    counters: Counters,
    batch,
    BATCH: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    RULE: tl.constexpr,
    TIMED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Write the plan and the counters, as ``write_plan`` does.

    The first program writes how much there is. The next ``ceil(batch / BLOCK)`` programs write the
    entries of as many queries, and the others tiles in turn.
    """
    if OVERLAPPED:
        gdc_wait()
    choice = _choice_of(flat, batch, RULE)
    query_programs = (batch + BLOCK - 1) // BLOCK
    program = tl.program_id(0) - 1
    if program >= query_programs:
        step = tl.num_programs(0) - 1 - query_programs
        for tile in range(program - query_programs, _num_tiles(choice, flat.groups), step):
            _write_tile(
                tile, choice, flat, table_rows_ptr, segment_table_ptr, items, BLOCKS, COLUMNS, RULE
            )
    else:
        slots = slots_of(flat.results, batch, BATCH)
        if program >= 0:
            place = program * BLOCK + tl.arange(0, BLOCK)
            _write_entries(place, slots, choice, flat, items, batch, COLUMNS, RULE)
        else:
            write_reduction(reduction, slots, flat.order, batch, BATCH)
            _write_totals(choice, flat, items, counters, batch, BATCH, BLOCKS, COLUMNS, RULE, TIMED)
