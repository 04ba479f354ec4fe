"""Device planner, 7: the plan's arrays.

A program writes one node's range, or the leaves of a block of requests. Partial results of a query
are neighbours, in the order from the root to its leaf; those that the reduction merges come first,
then those that leaves merge themselves.
"""

from __future__ import annotations

import triton.language as tl
from triton import jit
from triton.language.extra.cuda import gdc_wait, globaltimer

from deft_backend.planner import encoding_constants


@jit
def _slots(parts_ptr, merged_ptr, batch, BATCH: tl.constexpr):
    """First slot of the request at each position, results that are reduced, and their total."""
    place = tl.arange(0, BATCH)
    parts = tl.load(parts_ptr + place, mask=place < batch, other=0)
    merged = tl.load(merged_ptr + place, mask=place < batch, other=0)
    reduced = tl.where((parts > 1) & (merged == 0), parts, 0)
    reduced_until = tl.associative_scan(reduced, 0, tl.standard._sum_combine)
    merged_until = tl.associative_scan(merged, 0, tl.standard._sum_combine)
    num_reduced = tl.reduce(reduced, 0, tl.standard._sum_combine)
    slots = tl.where(merged > 0, num_reduced + merged_until - merged, reduced_until - reduced)
    return slots, reduced, num_reduced


@jit
def _count(counters_ptr, seen_ptr, counter, more):
    total = tl.load(counters_ptr + counter) + more
    tl.store(counters_ptr + counter, total)
    tl.store(seen_ptr + counter, total)


@jit
def _write_totals(
    order_ptr, range_queries_ptr, range_begin_ptr, range_end_ptr, range_pieces_ptr, tile_ptr,
    item_segment_ptr, item_query_ptr, num_reduce_ptr, reduce_query_ptr, reduce_slot_ptr,
    counters_ptr, seen_ptr, began_ptr, slots, reduced, num_reduced, batch, small_tile, large_tile,
    BATCH: tl.constexpr, TIMED: tl.constexpr,
):  # fmt: skip
    """The reduction's queries, how much there is of everything, and the counters."""
    place = tl.arange(0, BATCH)
    inside = place < batch
    is_reduced = (reduced > 0).to(tl.int32)
    number = tl.associative_scan(is_reduced, 0, tl.standard._sum_combine) - is_reduced
    count = tl.reduce(is_reduced, 0, tl.standard._sum_combine)
    row = tl.load(order_ptr + place, mask=inside, other=0)
    tl.store(reduce_query_ptr + number, row, mask=reduced > 0)
    tl.store(reduce_slot_ptr + number, slots, mask=reduced > 0)
    tl.store(reduce_slot_ptr + count, num_reduced)
    tl.store(num_reduce_ptr, count)

    which = tl.arange(0, 2 * BATCH)
    queries = tl.load(range_queries_ptr + which)
    pieces = tl.load(range_pieces_ptr + which)
    is_large = queries > small_tile
    held = tl.where(is_large, large_tile, tl.maximum(small_tile, 1))
    items = (queries + held - 1) // held * pieces
    large_items = tl.where(is_large, items, 0)
    total = tl.reduce(items, 0, tl.standard._sum_combine)
    tl.store(tile_ptr, 0)
    tl.store(tile_ptr + 1, tl.reduce(large_items, 0, tl.standard._sum_combine))
    tl.store(tile_ptr + 2, total)
    tl.store(tile_ptr + 3, total)
    tl.store(item_segment_ptr + total, total)
    entries = tl.reduce(queries * pieces, 0, tl.standard._sum_combine)
    tl.store(item_query_ptr + total, entries)

    # What the step reads, and what it would read query by query, in tokens.
    begin = tl.load(range_begin_ptr + which)
    end = tl.load(range_end_ptr + which)
    tiles = (queries + held - 1) // held
    loaded = tl.where(queries > 0, tiles.to(tl.int64) * (end - begin).to(tl.int64), 0)
    leaf_end = tl.load(range_end_ptr + BATCH + place, mask=inside, other=0).to(tl.int64)
    _count(counters_ptr, seen_ptr, 0, tl.full([], 1, tl.int64))
    _count(counters_ptr, seen_ptr, 1, tl.reduce(leaf_end, 0, tl.standard._sum_combine))
    _count(counters_ptr, seen_ptr, 2, tl.reduce(loaded, 0, tl.standard._sum_combine))
    if TIMED:  # from the first launch's first program to here, which ends about when the others do
        _count(counters_ptr, seen_ptr, 3, globaltimer() - tl.load(began_ptr))


@jit(do_not_specialize=["batch", "small_tile", "large_tile", "block"])
def write_plan(
    table_rows_ptr,
    segment_table_ptr,
    order_ptr,
    first_ptr,
    range_queries_ptr,
    range_begin_ptr,
    range_end_ptr,
    range_pieces_ptr,
    range_item_ptr,
    range_entry_ptr,
    range_part_ptr,
    parts_ptr,
    merged_ptr,
    tile_ptr,
    item_segment_ptr,
    item_query_ptr,
    segment_row_ptr,
    segment_start_ptr,
    segment_end_ptr,
    segment_span_ptr,
    entry_query_ptr,
    entry_slot_ptr,
    num_reduce_ptr,
    reduce_query_ptr,
    reduce_slot_ptr,
    counters_ptr,
    seen_ptr,
    began_ptr,
    batch,
    small_tile,
    large_tile,
    block,
    BATCH: tl.constexpr,
    LEAVES: tl.constexpr,
    WIDTH: tl.constexpr,
    TIMED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """The arrays of :class:`~deft_backend.planner.plan.Plan`, and the counters.

    The first ``ceil(batch / LEAVES)`` programs write leaves, the others nodes. counters [4] int64:
    plans, tokens of context in them, tokens that their items load, and nanoseconds; `seen` gets a
    copy, which the host reads in its own memory.
    """
    DIRECT: tl.constexpr = encoding_constants.DIRECT.value
    MERGES: tl.constexpr = encoding_constants.MERGES.value
    OPEN_END: tl.constexpr = encoding_constants.OPEN_END.value
    SPAN_SHIFT: tl.constexpr = encoding_constants.SPAN_SHIFT.value
    if OVERLAPPED:
        gdc_wait()
    leaf_programs = (batch + LEAVES - 1) // LEAVES
    program = tl.program_id(0)
    if program >= leaf_programs:
        node = program - leaf_programs
        queries = tl.load(range_queries_ptr + node)
        if queries > 0:
            slots, _, _ = _slots(parts_ptr, merged_ptr, batch, BATCH)
            first = tl.load(first_ptr + node)
            begin = tl.load(range_begin_ptr + node)
            end = tl.load(range_end_ptr + node)
            pieces = tl.load(range_pieces_ptr + node)
            first_item = tl.load(range_item_ptr + node)
            first_entry = tl.load(range_entry_ptr + node)
            part = tl.load(range_part_ptr + node)
            row = tl.load(order_ptr + first)
            table_row = tl.load(table_rows_ptr + row).to(tl.int32)
            is_large = queries > small_tile
            held = tl.where(is_large, large_tile, tl.maximum(small_tile, 1))
            tiles = (queries + held - 1) // held
            blocks = (end - begin + block - 1) // block
            lane = tl.arange(0, WIDTH)
            for at in range(0, pieces * tiles, WIDTH):
                index = at + lane
                is_item = index < pieces * tiles
                piece = index // tiles
                tile = index % tiles
                from_query = tile * queries // tiles
                span = ((tile + 1) * queries // tiles - from_query) << SPAN_SHIFT
                item = first_item + index
                start = begin + piece * blocks // pieces * block
                stop = tl.minimum(end, begin + (piece + 1) * blocks // pieces * block)
                entry = first_entry + piece * queries + from_query
                tl.store(item_segment_ptr + item, item, mask=is_item)
                tl.store(item_query_ptr + item, entry, mask=is_item)
                none = tl.full([WIDTH], 0, tl.int32)
                tl.store(segment_table_ptr + item, none + table_row, mask=is_item)
                tl.store(segment_row_ptr + item, none + row, mask=is_item)
                tl.store(segment_start_ptr + item, start, mask=is_item)
                tl.store(segment_end_ptr + item, stop, mask=is_item)
                tl.store(segment_span_ptr + item, tl.where(is_large, span, 0), mask=is_item)
            for at in range(0, pieces * queries, WIDTH):
                index = at + lane
                is_entry = index < pieces * queries
                piece = index // queries
                position = tl.where(is_entry, first + index % queries, 0)
                slot = tl.gather(slots, position, 0) + part + piece
                query = tl.load(order_ptr + position, mask=is_entry, other=0)
                tl.store(entry_query_ptr + first_entry + index, query, mask=is_entry)
                tl.store(entry_slot_ptr + first_entry + index, slot, mask=is_entry)
    else:
        slots, reduced, num_reduced = _slots(parts_ptr, merged_ptr, batch, BATCH)
        position = program * LEAVES + tl.arange(0, LEAVES)
        is_leaf = position < batch
        leaf = BATCH + position
        row = tl.load(order_ptr + position, mask=is_leaf, other=0)
        table_row = tl.load(table_rows_ptr + row, mask=is_leaf, other=0).to(tl.int32)
        begin = tl.load(range_begin_ptr + leaf, mask=is_leaf, other=0)
        end = tl.load(range_end_ptr + leaf, mask=is_leaf, other=0)
        pieces = tl.load(range_pieces_ptr + leaf, mask=is_leaf, other=0)
        first_item = tl.load(range_item_ptr + leaf, mask=is_leaf, other=0)
        first_entry = tl.load(range_entry_ptr + leaf, mask=is_leaf, other=0)
        part = tl.load(range_part_ptr + leaf, mask=is_leaf, other=0)
        my_parts = tl.load(parts_ptr + position, mask=is_leaf, other=0)
        my_merged = tl.load(merged_ptr + position, mask=is_leaf, other=0)
        my_slots = tl.gather(slots, tl.where(is_leaf, position, 0), 0)
        blocks = (end - begin + block - 1) // block
        whole = tl.where(my_parts == 1, DIRECT, MERGES - my_slots)
        small = small_tile > 0
        most = tl.reduce(pieces, 0, tl.standard._elementwise_max)
        for piece in range(0, most):
            is_item = piece < pieces
            item = first_item + piece
            entry = first_entry + piece
            divisor = tl.maximum(pieces, 1)
            start = begin + piece * blocks // divisor * block
            stop = tl.minimum(end, begin + (piece + 1) * blocks // divisor * block)
            stop = tl.where(piece == pieces - 1, OPEN_END, stop)
            partial = (my_parts > 1) & (my_merged == 0)
            slot = tl.where(partial, my_slots + part + piece, whole)
            span = tl.where(small, my_merged, 1 << SPAN_SHIFT)
            tl.store(item_segment_ptr + item, item, mask=is_item)
            tl.store(item_query_ptr + item, entry, mask=is_item)
            tl.store(segment_table_ptr + item, table_row, mask=is_item)
            tl.store(segment_row_ptr + item, row, mask=is_item)
            tl.store(segment_start_ptr + item, start, mask=is_item)
            tl.store(segment_end_ptr + item, stop, mask=is_item)
            tl.store(segment_span_ptr + item, span, mask=is_item)
            tl.store(entry_query_ptr + entry, row, mask=is_item)
            tl.store(entry_slot_ptr + entry, slot, mask=is_item)
        if program == 0:
            _write_totals(
                order_ptr, range_queries_ptr, range_begin_ptr, range_end_ptr, range_pieces_ptr,
                tile_ptr, item_segment_ptr, item_query_ptr, num_reduce_ptr, reduce_query_ptr,
                reduce_slot_ptr, counters_ptr, seen_ptr, began_ptr, slots, reduced, num_reduced,
                batch, small_tile, large_tile, BATCH, TIMED,
            )  # fmt: skip
