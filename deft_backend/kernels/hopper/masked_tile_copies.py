"""Copies to shared memory for masked tiles: offsets and spans of tokens, then K and V (Gluon).

A program takes an item's KV blocks in the order of its stream of tokens. Of the first blocks, it
knows where all tokens lie before the item begins. Of later blocks it learns this one by one: it
loads a block's page ids to registers while it works on the block before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from deft_backend.kernels.hopper.large_tile_copies import (
    copy_rows,
    read_rows,
    result_place,
    row_of_place,
)
from deft_backend.kernels.hopper.masked_tile_segments import by_lane, locate
from deft_backend.kernels.hopper.parts import offsets_of, places_of
from deft_backend.kernels.hopper.versions import barrier, gl, jit, reinterpret


class Buffers(NamedTuple):
    k: Any
    v: Any  # [slots, tokens, D]: rings of KV blocks
    key_operand: Any
    value_operand: Any
    """[tokens, D]: of a cache of 8 bits, the blocks being multiplied, as operands."""
    offsets: Any
    """[known, tokens] int32: ring of where the blocks' tokens lie in K and in V (`offsets_of`), in
    the order of `row_of_place`."""
    spans: Any
    hidden: Any
    """[known, tokens] int32: rings of the tokens' spans and numbers among their request's query
    tokens, in the same order. The second one only for several query tokens."""
    places: Any
    """[2, M] int32: where each query vector lies, and where its result goes (`result_place`)."""
    rows: Any  # [M, D]: Q, and later the results, as whole rows, while no block of V is there


class Block(NamedTuple):
    """What the threads know about one or more blocks of a stream: [rows, 32] numbers."""

    page: Any
    position: Any
    span: Any
    hidden: Any


class Asked(NamedTuple):
    """What an item needs first, on its way to registers."""

    blocks: Any  # its first blocks
    query: Any
    slot: Any  # [M]: of each query vector


class Stream(NamedTuple):
    """An item's tokens, for one KV head."""

    segments: Any
    filled: Any  # blocks that hold tokens
    k_base: Any
    v_base: Any  # [D] pointers: the first token of the KV head in the cache


@jit
def allocate(tensors, HEADS, CACHE, TILE, LAYOUT):
    """Allocate a program's shared memory, as for the large tile."""
    DTYPE: gl.constexpr = tensors.q.dtype.element_ty
    STORED: gl.constexpr = tensors.k.dtype.element_ty
    EXPONENT_BITS: gl.constexpr = CACHE.exponent_bits
    BLOCK_M: gl.constexpr = TILE.height
    BLOCK_N: gl.constexpr = TILE.block_tokens
    HEAD_DIM: gl.constexpr = HEADS.dim
    KNOWN: gl.constexpr = LAYOUT.known
    gl.static_assert(BLOCK_M == BLOCK_N)
    k = gl.allocate_shared_memory(STORED, [LAYOUT.slots, BLOCK_N, HEAD_DIM], LAYOUT.kv_matrix)
    v = gl.allocate_shared_memory(STORED, [LAYOUT.slots, BLOCK_N, HEAD_DIM], LAYOUT.kv_matrix)
    offsets = gl.allocate_shared_memory(gl.int32, [KNOWN, BLOCK_N], LAYOUT.plain)
    spans = gl.allocate_shared_memory(gl.int32, [KNOWN, BLOCK_N], LAYOUT.plain)
    hidden = spans
    if not HEADS.single:
        hidden = gl.allocate_shared_memory(gl.int32, [KNOWN, BLOCK_N], LAYOUT.plain)
    if EXPONENT_BITS > 0:
        keys = gl.allocate_shared_memory(DTYPE, [BLOCK_N, HEAD_DIM], LAYOUT.matrix)
        values = gl.allocate_shared_memory(DTYPE, [BLOCK_N, HEAD_DIM], LAYOUT.matrix)
        rows = values
    else:
        keys, values, rows = k.index(0), v.index(0), v.index(LAYOUT.slots - 1)
    places = gl.allocate_shared_memory(gl.int32, [2, BLOCK_M], LAYOUT.plain)
    return Buffers(k, v, keys, values, offsets, spans, hidden, places, rows)


@jit
def ask_blocks(first, segments, tensors, strides, COUNT, HEADS, CACHE, TILE, LAYOUT):
    """Start loading the page ids of COUNT blocks of a stream, from block `first` on."""
    BLOCK_N: gl.constexpr = TILE.block_tokens
    ROWS: gl.constexpr = COUNT * BLOCK_N // 32
    BY_LANE: gl.constexpr = by_lane(gl.num_warps())
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, BY_LANE))
    lane = gl.arange(0, 32, layout=gl.SliceLayout(0, BY_LANE))
    number = gl.expand_dims(row, 1) * 32 + gl.expand_dims(lane, 0)
    place = (first + number // BLOCK_N) * BLOCK_N
    place += row_of_place(number % BLOCK_N, BLOCK_N, LAYOUT.kv_at_once)
    found = locate(place, segments, tensors, strides, HEADS, CACHE)
    filled = (segments.tokens + BLOCK_N - 1) // BLOCK_N
    page = gl.load(found.entry, mask=place < filled * BLOCK_N, other=0).to(gl.int32)
    return Block(page, found.position, found.span, found.hidden)


@jit
def ask_item(there, item, segments, tensors, plan, strides, HEADS, CACHE, TILE, LAYOUT):
    """Start loading what an item needs first, if it is there.

    Rows outside the tile get the query and the slot of its last query, and nobody uses them.
    """
    LIST: gl.constexpr = LAYOUT.each
    KNOWN: gl.constexpr = LAYOUT.known
    blocks = ask_blocks(0, segments, tensors, strides, KNOWN, HEADS, CACHE, TILE, LAYOUT)
    row = row_of_place(gl.arange(0, TILE.height, layout=LIST), TILE.height, LAYOUT.at_once)
    row += item.queries >> 16  # 0, which the compiler does not know: see `hidden_zero`
    entry = item.entry + gl.minimum(row // HEADS.vectors, item.queries - 1)
    some = gl.full([TILE.height], True, gl.int1, LIST) & there
    query = gl.load(plan.entry_query + entry, mask=some, other=0)
    slot = gl.load(plan.entry_slot + entry, mask=some, other=0)
    return Asked(blocks, query, slot)


@jit
def _know(first, blocks, buffers, HEADS, CACHE):
    """Store where the tokens of blocks lie, and who attends to them, from slot `first` on."""
    ROWS: gl.constexpr = blocks.page.shape[0]
    BLOCK_ROWS: gl.constexpr = buffers.spans.shape[1] // 32
    SLOTS: gl.constexpr = buffers.spans.shape[0] * BLOCK_ROWS // ROWS
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    offset = offsets_of(blocks.page, blocks.position, CACHE)
    reinterpret(buffers.offsets, gl.int32, [SLOTS, ROWS, 32], SHARED).index(first).store(offset)
    reinterpret(buffers.spans, gl.int32, [SLOTS, ROWS, 32], SHARED).index(first).store(blocks.span)
    if not HEADS.single:
        hidden = reinterpret(buffers.hidden, gl.int32, [SLOTS, ROWS, 32], SHARED)
        hidden.index(first).store(blocks.hidden)


@jit
def take_item(asked, kv_head, zero, buffers, tensors, strides, HEADS, CACHE, TILE, LAYOUT):
    """Turn what `ask_item` loaded into addresses, in shared memory."""
    LIST: gl.constexpr = LAYOUT.each
    row = row_of_place(gl.arange(0, TILE.height, layout=LIST), TILE.height, LAYOUT.at_once) + zero
    some = gl.full([TILE.height], True, gl.int1, LIST)
    places = places_of(asked.query, row % HEADS.vectors, some, kv_head, tensors, HEADS)
    _know(0, asked.blocks, buffers, HEADS, CACHE)
    q_at = places.row * (strides.q_batch // 8) + places.head * (strides.q_head // 8)
    buffers.places.index(0).store(q_at.to(gl.int32))
    buffers.places.index(1).store(result_place(places, asked.slot, strides, HEADS))
    barrier()


@jit
def copy_next_blocks(
    step, now, learned, stream, buffers, tensors, strides, HEADS, CACHE, TILE, LAYOUT
):
    """Start copying one more block of V and of K, and learn where the tokens of later ones lie.

    `learned` is the block behind the known ones, and returned is the one behind it; `step` and
    `now` are as for the large tile.
    """
    ROW: gl.constexpr = LAYOUT.kv_copy_row
    COPY: gl.constexpr = LAYOUT.kv_copy
    UNIT: gl.constexpr = LAYOUT.kv_unit
    AT_ONCE: gl.constexpr = LAYOUT.kv_at_once
    KNOWN: gl.constexpr = LAYOUT.known
    before = gl.where(now == 0, LAYOUT.slots - 1, now - 1)
    v_block, k_block = step + TILE.lookahead, step + TILE.lookahead + 1
    v_offset = read_rows(buffers.offsets.index(v_block % KNOWN), ROW, AT_ONCE)
    k_offset = read_rows(buffers.offsets.index(k_block % KNOWN), ROW, AT_ONCE)
    _know(step % KNOWN, learned, buffers, HEADS, CACHE)
    v, k = buffers.v.index(before), buffers.k.index(now)
    copy_rows(stream.filled > v_block, v, stream.v_base, v_offset, UNIT, COPY)
    copy_rows(stream.filled > k_block, k, stream.k_base, k_offset, UNIT, COPY)
    return ask_blocks(
        step + KNOWN + 1, stream.segments, tensors, strides, 1, HEADS, CACHE, TILE, LAYOUT
    )
