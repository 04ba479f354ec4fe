"""Stage 1 for the masked tile on Hopper: DeFT-Flatten's chunks (DeFT, Remark 3.1, Algorithm 3).

    S = Q K^T * sm_scale, -inf outside the mask,   LSE = log2 sum_n 2^(S_n * log2 e),
    O = softmax(S) V

The items, arguments and results are those of `partial_attention`, for the masked tile alone. An
item has up to 32 segments; each is attended to by a run of the item's queries, its span. All
segments form one stream of tokens, and a KV block holds 64 tokens of it, whatever their segments.

The products, the softmax and the rings of K and V are those of the large tile
(`kernels/hopper/large_tile`). Two things differ. The ring of offsets also brings each token's span,
which masks the scores. And the page ids of a stream lie in several rows of the page table
(`segments.py`), so threads load them to registers.

Chunks are short: most items have two KV blocks. So a program loads ahead of time. While it works
on an item, it follows three links of the next one: the item's segments, the requests' rows and
lengths, and the page ids of its first blocks. The item behind that one is read as well.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deft_backend.kernels.arguments import Scaling, Strides, Tensors
from deft_backend.kernels.hopper.large_tile_copies import (
    arrived,
    copy_ahead,
    copy_queries,
    read_rows,
)
from deft_backend.kernels.hopper.large_tile_memory import hidden_zero, layout_of
from deft_backend.kernels.hopper.large_tile_results import (
    add_scores,
    first_product,
    last_product,
    softmax,
    start_products,
    write_results,
)
from deft_backend.kernels.hopper.masked_tile_copies import (
    Stream,
    allocate,
    ask_blocks,
    ask_item,
    copy_next_blocks,
    take_item,
)
from deft_backend.kernels.hopper.masked_tile_segments import (
    follow_segments,
    in_span,
    join_segments,
    list_segments,
    read_item,
)
from deft_backend.kernels.hopper.parts import ask_plan, capped, next_slot, plus, with_device_scales
from deft_backend.kernels.hopper.versions import gl, jit, wait_group, warpgroup_mma_wait
from deft_backend.planner.device_plan import ItemArrays


class State(NamedTuple):
    """The softmax of an item's blocks so far."""

    now: Any  # the slot of the V block to multiply next
    following: Any  # the slot of the K block to multiply next
    learned: Any  # the block behind those whose offsets are known
    maximum: Any  # [M]
    total: Any  # [M, 4]: sums by thread
    acc: Any  # [M, D]: without the block whose V comes next
    weights: Any  # [M, tokens]: of that block


class Rows(NamedTuple):
    """What the mask needs of each query vector: [M] numbers."""

    query: Any  # its query, counted from the item's first one
    token: Any  # its query token
    bits: Any  # where the token's bits lie in `ancestors`, in words of 32 bits


class Inputs(NamedTuple):
    """What all blocks of an item are added with."""

    q: Any
    stream: Any
    rows: Any
    scaling: Any
    buffers: Any


@jit
def _rows_of(item, zero, plan, strides, HEADS, TILE, LAYOUT):
    row = gl.arange(0, TILE.height, layout=LAYOUT.row) + zero
    query = row // HEADS.vectors
    token, bits = query, query
    if not HEADS.single:
        at = item.entry + gl.minimum(query, item.queries - 1)
        number = gl.load(plan.entry_query + at)
        token = number % HEADS.blocks * HEADS.tokens + row % HEADS.vectors // HEADS.group
        if HEADS.tree:
            bits = (number // HEADS.blocks).to(gl.int64) * strides.ancestors_batch
            bits += gl.minimum(token, HEADS.query_tokens - 1) * strides.ancestors_token
            bits *= 2
    return Rows(query, token, bits)


@jit
def _hide(scores, block, rows, buffers, tensors, HEADS, LAYOUT):
    """Scores with -inf where a query vector does not attend to a token of the block."""
    COLUMN: gl.constexpr = gl.SliceLayout(0, LAYOUT.scores)
    KNOWN: gl.constexpr = LAYOUT.known
    AT_ONCE: gl.constexpr = LAYOUT.kv_at_once
    span = read_rows(buffers.spans.index(block % KNOWN), COLUMN, AT_ONCE)
    seen = in_span(rows.query, span)
    if not HEADS.single:
        hidden = read_rows(buffers.hidden.index(block % KNOWN), COLUMN, AT_ONCE)
        if HEADS.tree:
            # Words of 32 bits: the loads of a block need fewer registers.
            words = tensors.ancestors.to(gl.pointer_type(gl.int32), bitcast=True)
            number = gl.maximum(hidden, 0)
            word = gl.expand_dims(rows.bits, 1) + gl.expand_dims(number // 32, 0)
            wanted = seen & (gl.expand_dims(hidden, 0) >= 0)
            bits = gl.load(words + word, mask=wanted, other=-1)
            seen = seen & ((bits >> gl.expand_dims(number % 32, 0)) % 2 != 0)
        else:
            seen = seen & (gl.expand_dims(hidden, 0) <= gl.expand_dims(rows.token, 1))
    return gl.where(seen, scores, float("-inf"))


@jit
def _add_block(state, step, inputs, tensors, strides, HEADS, CACHE, TILE, MODE, LAYOUT):
    """The softmax with one more block, while P V of the block taken before it runs."""
    stream, buffers, scaling = inputs.stream, inputs.buffers, inputs.scaling
    now = state.now
    started, summing = start_products(state, inputs.q, buffers, CACHE, TILE, LAYOUT)
    learned = copy_next_blocks(
        step, now, state.learned, stream, buffers, tensors, strides, HEADS, CACHE, TILE, LAYOUT
    )
    now, following = state.following, next_slot(state.following, LAYOUT.slots)
    scores = warpgroup_mma_wait(1, deps=[started])
    scores = capped(scores, scaling, MODE.soft_cap)
    scores = _hide(scores, step + 1, inputs.rows, buffers, tensors, HEADS, LAYOUT)
    maximum, total, acc, weights = add_scores(state, scores, summing, inputs, TILE, MODE, LAYOUT)
    return State(now, following, learned, maximum, total, acc, weights)


@jit
def hopper_masked_tile_attention(
    tensors: Tensors,
    plan: ItemArrays,
    scaling: Scaling,
    strides: Strides,
    HEADS: gl.constexpr,
    CACHE: gl.constexpr,
    TILE: gl.constexpr,
    MODE: gl.constexpr,
):
    DTYPE: gl.constexpr = tensors.q.dtype.element_ty
    BLOCK_M: gl.constexpr = TILE.height
    BLOCK_N: gl.constexpr = TILE.block_tokens
    HEAD_DIM: gl.constexpr = HEADS.dim
    EXPONENT_BITS: gl.constexpr = CACHE.exponent_bits
    LAYOUT: gl.constexpr = layout_of(
        HEAD_DIM, BLOCK_N, TILE.lookahead, gl.num_warps(), EXPONENT_BITS
    )
    ROW: gl.constexpr = LAYOUT.row
    KNOWN: gl.constexpr = LAYOUT.known
    gl.static_assert(TILE.lookahead + 2 <= KNOWN)
    gl.static_assert(TILE.block_segments <= 32)  # a lane holds one

    ask_plan(plan, LAYOUT)
    buffers = allocate(tensors, HEADS, CACHE, TILE, LAYOUT)
    scaling = with_device_scales(scaling, tensors, MODE)
    factor = scaling.scale
    if MODE.soft_cap:
        factor = 1.0
    offs_d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LAYOUT.copy))
    offs_kv = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LAYOUT.kv_copy))
    first_work = gl.load(plan.tile_ptr + TILE.place) * HEADS.num_kv + gl.program_id(0)
    work_end = gl.load(plan.tile_ptr + TILE.place + 1) * HEADS.num_kv
    step_work = gl.num_programs(0)
    item = read_item(first_work, work_end, plan, HEADS)
    next_item = read_item(first_work + step_work, work_end, plan, HEADS)
    # As in the large tile: a program without an item ends, and its end lets the next kernel start.
    if first_work < work_end:
        if MODE.overlapped:
            gdc_launch_dependents()
    listed = list_segments(item, plan)
    followed = follow_segments(item, listed, tensors, HEADS)
    segments = join_segments(listed, followed)
    asked = ask_item(
        first_work < work_end, item, segments, tensors, plan, strides, HEADS, CACHE, TILE, LAYOUT
    )

    for work in range(first_work, work_end, step_work):
        # KV heads of one item are neighbours: they read the same page-table entries.
        kv_head = work % HEADS.num_kv
        zero = hidden_zero(item.queries)
        filled = (segments.tokens + BLOCK_N - 1) // BLOCK_N
        blocks = gl.maximum(filled, 1)  # an item without tokens runs one block, all of it masked
        take_item(asked, kv_head, zero, buffers, tensors, strides, HEADS, CACHE, TILE, LAYOUT)
        base = kv_head.to(gl.int64) * CACHE.head + offs_kv
        stream = Stream(segments, filled, tensors.k + base, tensors.v + base)
        copy_queries(item, zero, tensors.q + offs_d, buffers, HEADS, TILE, LAYOUT)
        for ahead in gl.static_range(TILE.lookahead + 1):
            copy_ahead(ahead, stream, buffers, LAYOUT)

        # Two links of the next item, and the item behind it.
        listed = list_segments(next_item, plan)
        later_item = read_item(work + 2 * step_work, work_end, plan, HEADS)
        learned = ask_blocks(KNOWN, segments, tensors, strides, 1, HEADS, CACHE, TILE, LAYOUT)
        rows = _rows_of(item, zero, plan, strides, HEADS, TILE, LAYOUT)
        arrived(2 * TILE.lookahead)
        q = buffers.rows.load(LAYOUT.queries)  # a V block comes where Q is
        scores = first_product(q, buffers, CACHE, TILE, LAYOUT)
        followed = follow_segments(next_item, listed, tensors, HEADS)
        scores = capped(scores, scaling, MODE.soft_cap)
        scores = _hide(scores, 0, rows, buffers, tensors, HEADS, LAYOUT)
        maximum = gl.full([BLOCK_M], float("-inf"), gl.float32, ROW)
        acc = gl.zeros([BLOCK_M, HEAD_DIM], gl.float32, LAYOUT.output)
        fresh, total, maximum, _ = softmax(scores, maximum, factor, BLOCK_M, BLOCK_N, ROW)
        weights = gl.convert_layout(fresh.to(DTYPE), LAYOUT.weights)
        state = State(0, 1, learned, maximum, total, acc, weights)
        inputs = Inputs(q, stream, rows, scaling, buffers)
        for step in range(0, blocks - 1):
            state = _add_block(
                state, step, inputs, tensors, strides, HEADS, CACHE, TILE, MODE, LAYOUT
            )

        segments = join_segments(listed, followed)
        there = work + step_work < work_end
        asked = ask_item(
            there, next_item, segments, tensors, plan, strides, HEADS, CACHE, TILE, LAYOUT
        )
        arrived(0)
        acc = last_product(state, scaling, buffers, CACHE, LAYOUT)
        sums = gl.convert_layout(gl.reduce(state.total, 1, plus), ROW)
        maximum, zero = state.maximum, hidden_zero(state.now)
        write_results(
            acc, maximum, sums, item, kv_head, zero, buffers, tensors, HEADS, TILE, MODE, LAYOUT
        )
        item = next_item
        next_item = later_item

    wait_group(0)
    if MODE.overlapped:
        gdc_wait()
