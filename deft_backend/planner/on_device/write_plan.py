"""Device planner, 7: the plan's arrays.

A program writes one node's range, or the leaves of a block of requests. Partial results of a query
are neighbours, in the order from the root to its leaf. The slots of those that the reduction merges
come first, then the slots of those that leaves merge themselves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton import jit
from triton.language.extra.cuda import gdc_wait, globaltimer

from deft_backend.planner import encoding
from deft_backend.planner.device_plan import ItemArrays, ReduceArrays
from deft_backend.planner.on_device.arrays import Chosen, Counters, Places, Ranges, Results
from deft_backend.planner.on_device.tiles import chunk_at, chunk_begin, tiles_of, total


class Slots(NamedTuple):
    """Where the partial results of the request at each place [B] go."""

    first: Any  # first slot of the request
    reduced: Any  # results of the request that the reduction merges
    num_reduced: Any  # results that the reduction merges, of all requests


class Counts(NamedTuple):
    items: Any
    entries: Any
    large: Any  # items of the large tile
    ordered: Any  # items of the large tile and of the ordered tile
    single: Any  # items of one segment: of all tiles but the masked one
    segments: Any


class Written(NamedTuple):
    """What the plan is written from, and the arrays of stage 1."""

    table_rows: Any
    order: Any
    chosen: Any
    ranges: Any
    places: Any
    results: Any
    items: Any
    segment_table: Any
    batch: Any
    small_tile: Any
    held: Any  # most queries of a range that takes the small tile, or the ordered tile
    large_tile: Any
    block: Any


class Range(NamedTuple):
    """One range, or those of a block of leaves: numbers of `Ranges` and `Places`."""

    begin: Any
    end: Any
    num_chunks: Any
    item: Any
    entry: Any
    part: Any
    length: Any  # tokens of the first query's request


@jit
def slots_of(results, batch, BATCH):
    place = tl.arange(0, BATCH)
    parts = tl.load(results.parts + place, mask=place < batch, other=0)
    merged = tl.load(results.merged + place, mask=place < batch, other=0)
    reduced = tl.where((parts > 1) & (merged == 0), parts, 0)
    reduced_until = tl.associative_scan(reduced, 0, tl.standard._sum_combine)
    merged_until = tl.associative_scan(merged, 0, tl.standard._sum_combine)
    num_reduced = total(reduced)
    first = tl.where(merged > 0, num_reduced + merged_until - merged, reduced_until - reduced)
    return Slots(first, reduced, num_reduced)


@jit
def _read_range(plan, at, leaf, there):
    """The range at `at`, whose first query has its leaf's range at `leaf`."""
    ranges, places = plan.ranges, plan.places
    begin = tl.load(ranges.begin + at, mask=there, other=0)
    end = tl.load(ranges.end + at, mask=there, other=0)
    num_chunks = tl.load(places.num_chunks + at, mask=there, other=0)
    item = tl.load(places.item + at, mask=there, other=0)
    entry = tl.load(places.entry + at, mask=there, other=0)
    part = tl.load(places.part + at, mask=there, other=0)
    length = tl.load(ranges.end + leaf, mask=there, other=0)
    return Range(begin, end, num_chunks, item, entry, part, length)


@jit
def _in_turn(number, range_, CHUNKS):
    """The chunk whose items come as number `number` of a range's: the longest come first."""
    if CHUNKS == "absolute":
        number = range_.num_chunks - 1 - number
    return number


@jit
def _chunk_of(range_, chunk, block, CHUNKS):
    """First token of a range's chunk number `chunk`, and the one after its last.

    The range's blocks are spread evenly over its chunks, unless their places are fixed.
    """
    if CHUNKS == "absolute":
        number = chunk_at(range_.begin, range_.length, block) + chunk
        start = chunk_begin(number, range_.length, block)
        return start, tl.minimum(range_.end, chunk_begin(number + 1, range_.length, block))
    else:
        blocks = (range_.end - range_.begin + block - 1) // block
        num_chunks = tl.maximum(range_.num_chunks, 1)
        # chunk * blocks // num_chunks, whose product would overflow
        each, more = blocks // num_chunks, blocks % num_chunks
        start = range_.begin + (chunk * each + chunk * more // num_chunks) * block
        stop = range_.begin + ((chunk + 1) * each + (chunk + 1) * more // num_chunks) * block
        return start, tl.minimum(range_.end, stop)


@jit
def _write_items(plan, item, entry, request, table_row, start, stop, span, there):
    items = plan.items
    tl.store(items.item_segment_ptr + item, item, mask=there)
    tl.store(items.item_query_ptr + item, entry, mask=there)
    tl.store(plan.segment_table + item, table_row, mask=there)
    tl.store(items.segment_request + item, request, mask=there)
    tl.store(items.segment_start + item, start, mask=there)
    tl.store(items.segment_end + item, stop, mask=there)
    tl.store(items.segment_span + item, span, mask=there)


@jit
def _write_node(number, slots, plan, BATCH, BLOCKS, WIDTH, CHUNKS):
    """Write the items and entries of a node's range: for each chunk, a tile after the other."""
    SPAN_SHIFT: tl.constexpr = encoding.SPAN_SHIFT
    chosen, items = plan.chosen, plan.items
    node = tl.load(chosen.place + number)
    first = tl.load(chosen.first + number)
    queries = tl.load(chosen.queries + number)
    range_ = _read_range(plan, node, BATCH + first, queries > 0)
    request = tl.load(plan.order + first) // BLOCKS
    table_row = tl.load(plan.table_rows + request).to(tl.int32)
    is_large, tiles = tiles_of(queries, plan.held, plan.large_tile)
    lane = tl.arange(0, WIDTH)
    for at in range(0, range_.num_chunks * tiles, WIDTH):
        index = at + lane
        turn = index // tiles
        tile = index % tiles
        chunk = _in_turn(turn, range_, CHUNKS)
        from_query = tile * queries // tiles
        to_query = (tile + 1) * queries // tiles
        span = (to_query - from_query) << SPAN_SHIFT
        if CHUNKS != "absolute":
            span = tl.where(is_large, span, 0)
        start, stop = _chunk_of(range_, chunk, plan.block, CHUNKS)
        entry = range_.entry + turn * queries + from_query
        item, there = range_.item + index, index < range_.num_chunks * tiles
        _write_items(plan, item, entry, request, table_row, start, stop, span, there)
    for at in range(0, range_.num_chunks * queries, WIDTH):
        index = at + lane
        there = index < range_.num_chunks * queries
        place = tl.where(there, first + index % queries, 0)
        chunk = _in_turn(index // queries, range_, CHUNKS)
        slot = tl.gather(slots.first, place, 0) + range_.part + chunk
        query = tl.load(plan.order + place, mask=there, other=0)
        tl.store(items.entry_query + range_.entry + index, query, mask=there)
        tl.store(items.entry_slot + range_.entry + index, slot, mask=there)


@jit
def _write_leaves(place, slots, plan, BATCH, BLOCKS, CHUNKS):
    """Write the items of the leaves at places: one entry for each item.

    By the rule ``absolute`` the last chunks' items lie behind those of all other chunks.
    """
    DIRECT: tl.constexpr = encoding.DIRECT
    MERGES: tl.constexpr = encoding.MERGES
    OPEN_END: tl.constexpr = encoding.OPEN_END
    SPAN_SHIFT: tl.constexpr = encoding.SPAN_SHIFT
    items, block = plan.items, plan.block
    is_leaf = place < plan.batch
    query = tl.load(plan.order + place, mask=is_leaf, other=0)
    request = query // BLOCKS
    table_row = tl.load(plan.table_rows + request, mask=is_leaf, other=0).to(tl.int32)
    range_ = _read_range(plan, BATCH + place, BATCH + place, is_leaf)
    parts = tl.load(plan.results.parts + place, mask=is_leaf, other=0)
    merged = tl.load(plan.results.merged + place, mask=is_leaf, other=0)
    first_slot = tl.gather(slots.first, tl.where(is_leaf, place, 0), 0)
    whole = tl.where(parts == 1, DIRECT, MERGES - first_slot)
    partial = (parts > 1) & (merged == 0)
    span = tl.where(plan.small_tile > 0, merged, 1 << SPAN_SHIFT)
    if CHUNKS == "absolute":
        before = _count_items(plan, BATCH)
        last = tl.maximum(range_.end - 1, range_.begin)
        start = chunk_begin(chunk_at(last, range_.end, block), range_.end, block)
        slot = tl.where(partial, first_slot + range_.part + range_.num_chunks, whole)
        item, entry, stop = before.items + place, before.entries + place, place * 0 + OPEN_END
        _write_items(plan, item, entry, request, table_row, start, stop, span, is_leaf)
        tl.store(items.entry_query + before.entries + place, query, mask=is_leaf)
        tl.store(items.entry_slot + before.entries + place, slot, mask=is_leaf)
        partial = is_leaf  # the other chunks are results of their own
        span = place * 0 + (1 << SPAN_SHIFT)
    for number in range(0, tl.reduce(range_.num_chunks, 0, tl.standard._elementwise_max)):
        there = number < range_.num_chunks
        entry = range_.entry + number
        chunk = _in_turn(number, range_, CHUNKS)
        start, stop = _chunk_of(range_, chunk, block, CHUNKS)
        if CHUNKS != "absolute":
            stop = tl.where(chunk == range_.num_chunks - 1, OPEN_END, stop)
        slot = tl.where(partial, first_slot + range_.part + chunk, whole)
        item = range_.item + number
        _write_items(plan, item, entry, request, table_row, start, stop, span, there)
        tl.store(items.entry_query + entry, query, mask=there)
        tl.store(items.entry_slot + entry, slot, mask=there)


@jit
def write_reduction(reduction, slots, order_ptr, batch, BATCH):
    """Write the queries whose results stage 2 merges, and their slots."""
    place = tl.arange(0, BATCH)
    is_reduced = (slots.reduced > 0).to(tl.int32)
    number = tl.associative_scan(is_reduced, 0, tl.standard._sum_combine) - is_reduced
    count = total(is_reduced)
    query = tl.load(order_ptr + place, mask=place < batch, other=0)
    tl.store(reduction.reduce_query + number, query, mask=slots.reduced > 0)
    tl.store(reduction.reduce_ptr + number, slots.first, mask=slots.reduced > 0)
    tl.store(reduction.reduce_ptr + count, slots.num_reduced)
    tl.store(reduction.num_reduce, count)


@jit
def _count_items(plan, BATCH):
    """Items and entries of all ranges, and items of the large tile."""
    which = tl.arange(0, 2 * BATCH)
    queries = tl.load(plan.ranges.queries + which)
    num_chunks = tl.load(plan.places.num_chunks + which)
    is_large, tiles = tiles_of(queries, plan.held, plan.large_tile)
    items = tiles * num_chunks
    large, every = total(tl.where(is_large, items, 0)), total(items)
    return Counts(every, total(queries * num_chunks), large, large, every, every)


@jit
def write_counts(items, counts):
    """Write how many items each tile shape has, and the ends of the last item; programs of stage 1
    count from 0 on."""
    ARRIVALS: tl.constexpr = encoding.ARRIVALS
    tl.store(items.tile_ptr, 0)
    tl.store(items.tile_ptr + 1, counts.large)
    tl.store(items.tile_ptr + 2, counts.ordered)
    tl.store(items.tile_ptr + 3, counts.single)
    tl.store(items.tile_ptr + 4, counts.items)
    tl.store(items.item_segment_ptr + counts.items, counts.segments)
    tl.store(items.item_query_ptr + counts.items, counts.entries)
    tl.store(items.arrivals + tl.arange(0, ARRIVALS), 0)


@jit
def _count(counters, which, more):
    counted = tl.load(counters.total + which) + more
    tl.store(counters.total + which, counted)
    tl.store(counters.seen + which, counted)


@jit
def count_plan(counters, ranges, loaded, batch, BATCH, BLOCKS, TIMED):
    """Count a plan, its tokens of context, the tokens that its items load, and its time."""
    place = tl.arange(0, BATCH)
    context = tl.load(ranges.end + BATCH + place, mask=place < batch, other=0).to(tl.int64)
    _count(counters, 0, tl.full([], 1, tl.int64))
    _count(counters, 1, total(context) // BLOCKS)
    _count(counters, 2, loaded)
    if TIMED:  # from the first kernel's first program to here, where the other programs end, too
        _count(counters, 3, globaltimer() - tl.load(counters.began))


@jit
def _write_totals(slots, plan, reduction, counters, BATCH, BLOCKS, CHUNKS, TIMED):
    """Write the reduction's queries, how much there is of everything, and the counters."""
    batch, small_tile, ranges = plan.batch, plan.small_tile, plan.ranges
    write_reduction(reduction, slots, plan.order, batch, BATCH)
    counts = _count_items(plan, BATCH)
    if CHUNKS == "absolute":
        large = tl.where(small_tile < 1, counts.large + batch, counts.large)
        ordered = tl.where(small_tile < 1, large, counts.items)
        every = counts.items + batch
        counts = Counts(every, counts.entries + batch, large, ordered, every, every)
    write_counts(plan.items, counts)

    # What the step reads, and what it would read query by query, in tokens.
    which = tl.arange(0, 2 * BATCH)
    queries = tl.load(ranges.queries + which)
    _, tiles = tiles_of(queries, plan.held, plan.large_tile)
    begin = tl.load(ranges.begin + which)
    end = tl.load(ranges.end + which)
    loaded = tl.where(queries > 0, tiles.to(tl.int64) * (end - begin).to(tl.int64), 0)
    count_plan(counters, ranges, total(loaded), batch, BATCH, BLOCKS, TIMED)


@jit(do_not_specialize=["batch", "small_tile", "large_tile", "block", "ordered_tile"])
def write_plan(
    table_rows_ptr,
    segment_table_ptr,
    order_ptr,
    chosen: Chosen,
    ranges: Ranges,
    places: Places,
    results: Results,
    items: ItemArrays,
    reduction: ReduceArrays,
    counters: Counters,
    batch,
    small_tile,
    large_tile,
    block,
    ordered_tile,
    BATCH: tl.constexpr,
    BLOCKS: tl.constexpr,
    LEAVES: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNKS: tl.constexpr,
    TIMED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Write the arrays of :class:`~deft_backend.planner.plan.Plan`, and the counters.

    The first program writes how much there is. The next ``ceil(batch / LEAVES)`` programs write
    leaves, the others nodes in turn. `segment_table` gets the page-table row of each segment.
    Chunks are whole KV blocks of `block` tokens. By the rule ``absolute``, the first chunks have
    `block` tokens, a request's last chunk takes the small tile, and others that up to
    `ordered_tile` queries read take the ordered tile.
    """
    if OVERLAPPED:
        gdc_wait()
    plan = Written(
        table_rows_ptr,
        order_ptr,
        chosen,
        ranges,
        places,
        results,
        items,
        segment_table_ptr,
        batch,
        small_tile,
        ordered_tile if CHUNKS == "absolute" else small_tile,
        large_tile,
        block,
    )
    leaf_programs = (batch + LEAVES - 1) // LEAVES
    program = tl.program_id(0) - 1
    if program >= leaf_programs:
        node_programs = tl.num_programs(0) - 1 - leaf_programs
        count = tl.load(chosen.count)
        if program - leaf_programs < count:
            slots = slots_of(results, batch, BATCH)
            for number in range(program - leaf_programs, count, node_programs):
                _write_node(number, slots, plan, BATCH, BLOCKS, WIDTH, CHUNKS)
    elif program >= 0:
        slots = slots_of(results, batch, BATCH)
        place = program * LEAVES + tl.arange(0, LEAVES)
        _write_leaves(place, slots, plan, BATCH, BLOCKS, CHUNKS)
    else:
        slots = slots_of(results, batch, BATCH)
        _write_totals(slots, plan, reduction, counters, BATCH, BLOCKS, CHUNKS, TIMED)
