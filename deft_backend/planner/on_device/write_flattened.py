"""Device planner, 8 and 9 of `deft-flatten`: where tiles go in the plan, and the plan's arrays.

``flatten.py`` has found the chunks and their tiles, and says why these kernels sort nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton import jit
from triton.language.extra.cuda import gdc_wait

from deft_backend.planner import encoding
from deft_backend.planner.device_plan import ItemArrays, ReduceArrays
from deft_backend.planner.on_device.arrays import Counters, Flat
from deft_backend.planner.on_device.flatten import choice_of, count_tiles, items_of, slices_of
from deft_backend.planner.on_device.tiles import overlap, sum_of_rows, total
from deft_backend.planner.on_device.write_plan import (
    Counts,
    count_plan,
    slots_of,
    write_counts,
    write_reduction,
)


class Entries(NamedTuple):
    """What chunks have for queries."""

    tile: Any
    items: Any  # items of the tile; 0 if the chunk has nothing for the query
    is_small: Any
    is_lone: Any  # whether the query has an item of the small tile to itself


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
    items = items_of(tl.load(tiles.segments + tile, mask=there, other=0), RULE)
    is_small = there & (tl.load(tiles.place + tile, mask=there, other=0) == 1)
    is_lone = is_small & (tl.load(tiles.queries + tile, mask=there, other=0) == 1)
    return Entries(tile, items, is_small.to(tl.int32), is_lone.to(tl.int32))


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
    overlap(OVERLAPPED)
    choice, tiles, results = choice_of(flat, batch, RULE), flat.tiles, flat.results
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
            parts += sum_of_rows(found.items)
            small += sum_of_rows(found.is_small)
            lone += sum_of_rows(found.is_lone)
        merges = (small == 1) & (lone == 1) & (parts > 1) & (parts <= RULE.max_merged + 1)
        tl.store(results.parts + place, parts, mask=place < batch)
        tl.store(results.merged + place, tl.where(merges, parts - 1, 0), mask=place < batch)
    else:
        num_tiles = count_tiles(choice, flat.groups)
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
                items = items_of(segments, RULE)
                entries = items * tl.load(tiles.queries + other, mask=inside, other=0)
                item += sum_of_rows(tl.where(before, items[None, :], 0))
                entry += sum_of_rows(tl.where(before, entries[None, :], 0))
                segment += sum_of_rows(tl.where(before, segments[None, :], 0))
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
        slot += sum_of_rows(results)[:, None]
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
        held = slices_of(element + at, at < slices, number, choice, flat.elements)
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
    tiles, num_tiles = flat.tiles, count_tiles(choice, flat.groups)
    none = tl.full([COLUMNS], 0, tl.int32)
    large, single, every, entries, segments = none, none, none, none, none
    loaded = none.to(tl.int64)
    for begin in range(0, num_tiles, COLUMNS):
        tile = begin + tl.arange(0, COLUMNS)
        there = tile < num_tiles
        place = tl.load(tiles.place + tile, mask=there, other=0)
        of_tile = tl.load(tiles.segments + tile, mask=there, other=0)
        held = items_of(of_tile, RULE)
        large += tl.where(place == 0, held, 0)
        single += tl.where(place < 2, held, 0)
        every += held
        entries += held * tl.load(tiles.queries + tile, mask=there, other=0)
        segments += of_tile
        loaded += tl.load(tiles.tokens + tile, mask=there, other=0)
    of_large = total(large)
    ends = (of_large, of_large, total(single))
    write_counts(items, Counts(total(every), total(entries), *ends, total(segments)))
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
    choice = choice_of(flat, batch, RULE)
    query_programs = (batch + BLOCK - 1) // BLOCK
    program = tl.program_id(0) - 1
    if program >= query_programs:
        step = tl.num_programs(0) - 1 - query_programs
        for tile in range(program - query_programs, count_tiles(choice, flat.groups), step):
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
