"""Copies to shared memory for small tiles: a stream of KV blocks across items (Gluon).

An item is a chain of loads, in which each link gives the addresses of the next. The stream starts
each link one item or one block before the next:

1. the item itself (`Item`), from the plan;
2. where its KV range ends now (`Segment`);
3. the page ids of its first block, and its queries;
4. keys and values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from deft_backend.kernels.hopper.parts import (
    Item,
    next_slot,
    offsets_of,
    places_of,
    range_end,
    read_item,
)
from deft_backend.kernels.hopper.small_tile_memory import keys_of, values_of
from deft_backend.kernels.hopper.versions import async_load, commit_group, gl, jit


class Segment(NamedTuple):
    """An item's KV range and queries, known by the second link."""

    entry: Any
    queries: Any
    table: Any  # the range's row of the page table
    start: Any
    length: Any


class Known(NamedTuple):
    """An item known by the third link: its keys and values can be copied."""

    segment: Segment
    page: Any  # [tokens]: page ids of the item's block that is copied next
    query: Any  # [M]: where each query vector lies in `q`; a negative number without one


class Later(NamedTuple):
    """What is known of the next three items; each is a link behind the one before it."""

    first: Known
    second: Segment
    third: Item


class Stream(NamedTuple):
    """Where the copies stand, and what is known of the items that are copied later."""

    work: Any  # the item and KV head that are copied
    block: Any  # number of the block that is copied next, in its segment
    slot: Any
    q_slot: Any  # the slots that K and V, and the queries, are copied to
    item: Known
    ahead_page: Any  # [tokens]: page ids of the block behind the next one
    later: Later


@jit
def tokens_of(item, tensors):
    """Tokens of an item's KV range."""
    return gl.maximum(range_end(item, tensors) - item.start, 0)


@jit
def _segment_of(item, tensors, strides):
    """Second link."""
    table = tensors.page_table + item.row.to(gl.int64) * strides.table
    return Segment(item.entry, item.queries, table, item.start, tokens_of(item, tensors))


@jit
def _positions(segment, block, TILE, LAYOUT):
    """Positions of a block's tokens. Past the end of the segment: its last token."""
    BLOCK_N: gl.constexpr = TILE.block_tokens
    offs_n = gl.arange(0, BLOCK_N, layout=LAYOUT.each)
    if TILE.ordered:  # from the end to the start
        block = gl.maximum((segment.length + BLOCK_N - 1) // BLOCK_N - 1 - block, 0)
    return segment.start + gl.minimum(block * BLOCK_N + offs_n, segment.length - 1)


@jit
def _read_pages(segment, block, CACHE, TILE, LAYOUT):
    """Third link: page ids of a block's tokens."""
    position = _positions(segment, block, TILE, LAYOUT)
    some = gl.full([TILE.block_tokens], True, gl.int1, LAYOUT.each) & (segment.length > 0)
    return gl.load(segment.table + position // CACHE.page_size, mask=some, other=0).to(gl.int32)


@jit
def _read_queries(segment, tensors, plan, HEADS, TILE, LAYOUT):
    """Third link: where each query vector of the tile lies in `q`."""
    offs_m = gl.arange(0, TILE.height, layout=LAYOUT.copy_row)
    query_of_row = offs_m // HEADS.vectors
    mask = query_of_row < segment.queries
    row = gl.load(plan.entry_query + segment.entry + query_of_row, mask=mask, other=0)
    if not HEADS.single:
        places = places_of(row, offs_m % HEADS.vectors, mask, 0, tensors, HEADS)
        row = gl.where(places.there, places.row, -1)
    return row


@jit
def _known(segment, tensors, plan, HEADS, CACHE, TILE, LAYOUT):
    """Third link."""
    page = _read_pages(segment, 0, CACHE, TILE, LAYOUT)
    return Known(segment, page, _read_queries(segment, tensors, plan, HEADS, TILE, LAYOUT))


@jit
def begin_stream(
    work, item, next_item, later_item, last_item, tensors, plan, strides, HEADS, CACHE, TILE, LAYOUT
):
    """The stream before its first block, from the program's first four items."""
    segment = _segment_of(item, tensors, strides)
    next_segment = _segment_of(next_item, tensors, strides)
    later_segment = _segment_of(later_item, tensors, strides)
    known = _known(segment, tensors, plan, HEADS, CACHE, TILE, LAYOUT)
    ahead_page = _read_pages(segment, 1, CACHE, TILE, LAYOUT)
    next_known = _known(next_segment, tensors, plan, HEADS, CACHE, TILE, LAYOUT)
    later = Later(next_known, later_segment, last_item)
    return Stream(work, 0, 0, 0, known, ahead_page, later)


@jit
def _copy_rows(buffer, base, offset, exist, LAYOUT):
    """Start copying rows, `offset` times 16 bytes from `base`; zeros unless they exist."""
    ROW: gl.constexpr = LAYOUT.kv_row
    wide = gl.convert_layout(offset, ROW).to(gl.uint32).to(gl.int64) * LAYOUT.kv_unit
    pointers = gl.expand_dims(base, 0) + wide[:, None]
    some = gl.full([buffer.shape[0]], True, gl.int1, ROW)
    async_load(buffer, pointers, mask=some[:, None] & exist)


@jit
def _copy_kv(stream, buffers, tensors, HEADS, CACHE, TILE, LAYOUT):
    """Start copying a block of K and of V.

    Past the segment's end these are copies of its last token: zeros would cost a mask a row.
    """
    head = (stream.work % HEADS.num_kv).to(gl.int64)
    segment, page = stream.item.segment, stream.item.page
    position = _positions(segment, stream.block, TILE, LAYOUT)
    offset = offsets_of(page, position, CACHE)
    base = head * CACHE.head + gl.arange(0, HEADS.dim, layout=LAYOUT.kv_dim)
    keys, values = keys_of(buffers, stream.slot), values_of(buffers, stream.slot)
    _copy_rows(keys, tensors.k + base, offset, segment.length > 0, LAYOUT)
    _copy_rows(values, tensors.v + base, offset, segment.length > 0, LAYOUT)


@jit
def _copy_queries(stream, buffers, tensors, strides, HEADS, TILE, LAYOUT):
    """Start copying the rows of an item's queries; zeros below them."""
    offs_m = gl.arange(0, TILE.height, layout=LAYOUT.copy_row)
    offs_d = gl.arange(0, HEADS.dim, layout=LAYOUT.copy_dim)
    if HEADS.single:
        head = stream.work % HEADS.num_kv * HEADS.group + offs_m % HEADS.group
        there = offs_m // HEADS.group < stream.item.segment.queries
    else:
        head = stream.work % HEADS.num_kv * HEADS.group + offs_m % HEADS.vectors % HEADS.group
        there = stream.item.query >= 0
    query = stream.item.query.to(gl.int64)
    row = query * (strides.q_batch // 8) + head * (strides.q_head // 8)
    async_load(
        buffers.q.index(stream.q_slot),
        tensors.q + row[:, None] * 8 + offs_d[None, :],
        mask=there[:, None],
    )


@jit
def _next_block(stream, LAYOUT):
    """The stream behind a block, within the same segment."""
    item = Known(stream.item.segment, stream.ahead_page, stream.item.query)
    block, slot = stream.block + 1, next_slot(stream.slot, LAYOUT.slots)
    return Stream(stream.work, block, slot, stream.q_slot, item, stream.ahead_page, stream.later)


@jit
def _next_item(stream, step, work_end, tensors, plan, strides, HEADS, CACHE, TILE, LAYOUT):
    """The stream at the next item's first block: each later item becomes known by one more link."""
    work = stream.work + step
    known = _known(stream.later.second, tensors, plan, HEADS, CACHE, TILE, LAYOUT)
    segment = _segment_of(stream.later.third, tensors, strides)
    last = read_item(work + 3 * step, work_end, tensors, plan, HEADS, AHEAD=False)
    q_slot = next_slot(stream.q_slot, LAYOUT.slots)
    later = Later(known, segment, last)
    return Stream(work, 0, stream.slot, q_slot, stream.later.first, stream.ahead_page, later)


@jit
def _with_page_ahead(stream, CACHE, TILE, LAYOUT):
    """The stream with the page ids of the block behind its next one."""
    page = _read_pages(stream.item.segment, stream.block + 1, CACHE, TILE, LAYOUT)
    slot, q_slot = stream.slot, stream.q_slot
    return Stream(stream.work, stream.block, slot, q_slot, stream.item, page, stream.later)


@jit
def copy_next_block(
    stream, step, work_end, buffers, tensors, plan, strides, HEADS, CACHE, TILE, LAYOUT
):
    """Start copying the stream's next block, an item's first block with the item's queries; returns
    the stream behind that block.
    """
    _copy_kv(stream, buffers, tensors, HEADS, CACHE, TILE, LAYOUT)
    if stream.block == 0:
        _copy_queries(stream, buffers, tensors, strides, HEADS, TILE, LAYOUT)
    commit_group()
    stream = _next_block(stream, LAYOUT)
    if stream.block * TILE.block_tokens >= stream.item.segment.length:
        stream = _next_item(
            stream, step, work_end, tensors, plan, strides, HEADS, CACHE, TILE, LAYOUT
        )
    return _with_page_ahead(stream, CACHE, TILE, LAYOUT)
