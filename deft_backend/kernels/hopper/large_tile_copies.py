"""Copies to shared memory for large tiles: page ids, offsets, then keys and values (Gluon).

A program takes an item's KV blocks from the last to the first. For each block it copies page ids
and turns them into offsets. Some blocks later it copies K and V from these offsets.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from deft_backend.kernels.hopper.large_tile_memory import in_one_row
from deft_backend.kernels.hopper.parts import offsets_of, places_of
from deft_backend.kernels.hopper.versions import (
    async_load,
    barrier,
    commit_group,
    fence_async_shared,
    gl,
    jit,
    reinterpret,
    wait_group,
)


class Segment(NamedTuple):
    """An item's KV range: its row of the page table, and its first and end position."""

    table: Any
    start: Any
    stop: Any


class Stream(NamedTuple):
    """The KV blocks of an item, for one KV head."""

    table: Any
    start: Any
    most: Any  # the segment's last position; `start` is its first
    filled: Any  # blocks that hold tokens
    k_base: Any
    v_base: Any  # [D] pointers: the first token of the KV head in the cache


@jit
def arrived(OUTSTANDING):
    """Wait for all but the newest OUTSTANDING copies; show them to all threads and tensor cores."""
    wait_group(OUTSTANDING)
    barrier()
    fence_async_shared()


@jit
def _within(position, least, most):
    """Positions, those outside a segment moved to its ends; an empty one's to the token before
    it.
    """
    return gl.maximum(gl.minimum(position, most), gl.minimum(least, most))


@jit
def row_of_place(place, ROWS, AT_ONCE):
    """Row of a block whose number is at a place in shared memory.

    The numbers of rows that one thread copies lie side by side: the thread reads them at once.
    """
    PASSES: gl.constexpr = ROWS // AT_ONCE
    return place % PASSES * AT_ONCE + place // PASSES


@jit
def read_rows(numbers, ROW, AT_ONCE):
    """[rows]: one number for each row of a block, from the order of `row_of_place`."""
    ROWS: gl.constexpr = numbers.shape[0]
    PASSES: gl.constexpr = ROWS // AT_ONCE
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    rows = gl.reshape(gl.arange(0, ROWS, layout=ROW), [PASSES, AT_ONCE])
    SPLIT: gl.constexpr = gl.permute(rows, (1, 0)).type.layout
    found = reinterpret(numbers, gl.int32, [AT_ONCE, PASSES], SHARED).load(SPLIT)
    return gl.convert_layout(gl.reshape(gl.permute(found, (1, 0)), [ROWS]), ROW)


@jit
def first_positions(segment, BLOCK_N, LAYOUT):
    """Where a segment's last block begins, its last position, and positions of its first blocks.

    The first blocks are the segment's last ones, of which the very last comes first. Masked rows
    hold tokens of the segment, too: any other number, even times 0, could spoil the result.
    """
    blocks = gl.maximum((segment.stop - segment.start + BLOCK_N - 1) // BLOCK_N, 1)
    last = segment.start + (blocks - 1) * BLOCK_N
    most = gl.maximum(segment.stop - 1, 0)
    known = gl.arange(0, LAYOUT.known * BLOCK_N, layout=LAYOUT.each)
    position = last - known // BLOCK_N * BLOCK_N
    position += row_of_place(known % BLOCK_N, BLOCK_N, LAYOUT.kv_at_once)
    return last, most, _within(position, segment.start, most)


@jit
def ask_item(there, item, segment, buffers, plan, HEADS, CACHE, TILE, LAYOUT):
    """Start copying what an item needs first, if it is there.

    That is the page ids of `first_positions`, and the query and the slot of each query vector. Rows
    outside the tile get those of its last query, and nobody uses them.
    """
    LIST: gl.constexpr = LAYOUT.each
    _, _, position = first_positions(segment, TILE.block_tokens, LAYOUT)
    # `queries` >> 16 is 0, which the compiler does not know: see `hidden_zero`.
    row = row_of_place(gl.arange(0, TILE.height, layout=LIST), TILE.height, LAYOUT.at_once)
    row += item.queries >> 16
    entry = item.entry + gl.minimum(row // HEADS.vectors, item.queries - 1)
    async_load(
        buffers.first_pages,
        segment.table + position // CACHE.page_size,
        mask=gl.full([LAYOUT.known * TILE.block_tokens], True, gl.int1, LIST) & there,
    )
    some = gl.full([TILE.height], True, gl.int1, LIST) & there
    async_load(buffers.entries.index(0), plan.entry_query + entry, mask=some)
    async_load(buffers.entries.index(1), plan.entry_slot + entry, mask=some)
    commit_group()


@jit
def result_place(places, slot, strides, HEADS):
    """Where query vectors' results go, in units of 16 bytes.

    A negative number, without its sign, is a place in the output. Other numbers are places among
    the partial results. 31 bits of these units reach 32 GiB. Without a query token the place is -1.
    """
    direct = places.row * (strides.out_batch // 8) + places.head * (strides.out_head // 8)
    partial = (slot * (HEADS.num_kv * HEADS.vectors) + places.result) * (HEADS.dim // 8)
    found = gl.where(slot < 0, direct.to(gl.int32) | -0x80000000, partial)
    if not HEADS.single:
        found = gl.where(places.there, found, -1)
    return found


@jit
def copy_rows(exists, buffer, base, offset, UNIT, COPY):
    """Start copying a block of K or V of one KV head, or of Q; zeros where nothing exists.

    `base` points to the head's first token, `offset` tells where the block's rows lie, in UNIT
    elements. `exists` is one boolean for the block, or [rows, 1]. It is a mask, because the
    compiler puts a barrier into every branch that copies.
    """
    pointers = gl.expand_dims(base, 0) + (offset.to(gl.uint32).to(gl.int64) * UNIT)[:, None]
    some = gl.full([buffer.shape[0], buffer.shape[1]], True, gl.int1, COPY)
    async_load(buffer, pointers, mask=some & exists)
    commit_group()


@jit
def _copy_pages(buffer, stream, position, PAGE_SIZE):
    """Start copying the page ids of positions within the segment."""
    async_load(buffer, stream.table + _within(position, stream.start, stream.most) // PAGE_SIZE)


@jit
def take_item(segment, kv_head, zero, buffers, tensors, strides, HEADS, CACHE, TILE, LAYOUT):
    """Turn what `ask_item` copied into addresses, in shared memory; returns where the segment's
    last block begins, and its last position.
    """
    LIST: gl.constexpr = LAYOUT.each
    last, most, position = first_positions(segment, TILE.block_tokens, LAYOUT)
    page = buffers.first_pages.load(LIST).to(gl.int32)
    query = buffers.entries.index(0).load(LIST)
    slot = buffers.entries.index(1).load(LIST)
    row = row_of_place(gl.arange(0, TILE.height, layout=LIST), TILE.height, LAYOUT.at_once) + zero
    some = gl.full([TILE.height], True, gl.int1, LIST)
    places = places_of(query, row % HEADS.vectors, some, kv_head, tensors, HEADS)
    barrier()  # the same memory holds the offsets

    in_one_row(buffers.offsets, LAYOUT).store(offsets_of(page, position, CACHE))
    q_at = places.row * (strides.q_batch // 8) + places.head * (strides.q_head // 8)
    buffers.places.index(0).store(q_at.to(gl.int32))
    buffers.places.index(1).store(result_place(places, slot, strides, HEADS))
    barrier()
    return last, most


@jit
def copy_queries(item, zero, q_base, buffers, HEADS, TILE, LAYOUT):
    """Start copying Q; zeros below the item's queries."""
    ROW: gl.constexpr = LAYOUT.copy_row
    offset = read_rows(buffers.places.index(0), ROW, LAYOUT.at_once)
    in_tile = gl.arange(0, TILE.height, layout=ROW) + zero < item.queries * HEADS.vectors
    COPY: gl.constexpr = LAYOUT.copy
    copy_rows(in_tile[:, None], buffers.rows, q_base, offset, 8, COPY)


@jit
def copy_ahead(ahead, stream, buffers, LAYOUT):
    """Start copying V of the block before an item's block number `ahead`, and K of that block."""
    ROW: gl.constexpr = LAYOUT.kv_copy_row
    COPY: gl.constexpr = LAYOUT.kv_copy
    UNIT: gl.constexpr = LAYOUT.kv_unit
    AT_ONCE: gl.constexpr = LAYOUT.kv_at_once
    if ahead > 0:
        offset = read_rows(buffers.offsets.index(ahead - 1), ROW, AT_ONCE)
        v = buffers.v.index(ahead - 1)
        copy_rows(stream.filled > ahead - 1, v, stream.v_base, offset, UNIT, COPY)
    offset = read_rows(buffers.offsets.index(ahead), ROW, AT_ONCE)
    k = buffers.k.index(ahead)
    copy_rows(stream.filled > ahead, k, stream.k_base, offset, UNIT, COPY)


@jit
def copy_first_blocks(stream, last, buffers, CACHE, TILE, LAYOUT):
    """Start copying an item's first blocks of K and V, and the page ids of the blocks behind them.

    `last` is where the last block begins; returned are the first positions of unknown offsets.
    """
    AT_ONCE: gl.constexpr = LAYOUT.kv_at_once
    BLOCK_N: gl.constexpr = TILE.block_tokens
    KNOWN: gl.constexpr = LAYOUT.known
    PAGES: gl.constexpr = LAYOUT.pages
    for ahead in gl.static_range(TILE.lookahead + 1):
        copy_ahead(ahead, stream, buffers, LAYOUT)
        if ahead == 0:  # nobody needs these page ids before V of the first block
            behind = gl.arange(0, PAGES // 2 * BLOCK_N, layout=LAYOUT.each)
            position = last - KNOWN * BLOCK_N - behind // BLOCK_N * BLOCK_N
            position += row_of_place(behind % BLOCK_N, BLOCK_N, AT_ONCE)
            pages = in_one_row(buffers.pages, LAYOUT)
            pages = pages.slice(KNOWN % PAGES * BLOCK_N, PAGES // 2 * BLOCK_N)
            _copy_pages(pages, stream, position, CACHE.page_size)
    position = last - KNOWN * BLOCK_N
    return position + row_of_place(gl.arange(0, BLOCK_N, layout=LAYOUT.each), BLOCK_N, AT_ONCE)


@jit
def copy_next_blocks(step, now, position, stream, buffers, CACHE, TILE, LAYOUT):
    """Start copying one more block of V and of K, and learn where the tokens of a later one lie.

    `step` counts the item's blocks, and `now` is the slot of the block that is multiplied. The new
    V replaces the V block before it, the new K its K. `position` [tokens] is where the block of
    unknown offsets lies; returned is the position of the block behind it.
    """
    ROW: gl.constexpr = LAYOUT.kv_copy_row
    COPY: gl.constexpr = LAYOUT.kv_copy
    UNIT: gl.constexpr = LAYOUT.kv_unit
    AT_ONCE: gl.constexpr = LAYOUT.kv_at_once
    KNOWN: gl.constexpr = LAYOUT.known
    PAGES: gl.constexpr = LAYOUT.pages
    before = gl.where(now == 0, LAYOUT.slots - 1, now - 1)
    v_block, k_block = step + TILE.lookahead, step + TILE.lookahead + 1
    v_offset = read_rows(buffers.offsets.index(v_block % KNOWN), ROW, AT_ONCE)
    k_offset = read_rows(buffers.offsets.index(k_block % KNOWN), ROW, AT_ONCE)
    page = buffers.pages.index((step + KNOWN) % PAGES).load(LAYOUT.each).to(gl.int32)
    buffers.offsets.index(step % KNOWN).store(offsets_of(page, position, CACHE))
    behind = PAGES // 2 * TILE.block_tokens
    pages = buffers.pages.index((step + KNOWN + PAGES // 2) % PAGES)
    _copy_pages(pages, stream, position - behind, CACHE.page_size)
    v, k = buffers.v.index(before), buffers.k.index(now)
    copy_rows(stream.filled > v_block, v, stream.v_base, v_offset, UNIT, COPY)
    copy_rows(stream.filled > k_block, k, stream.k_base, k_offset, UNIT, COPY)
    return position - TILE.block_tokens
