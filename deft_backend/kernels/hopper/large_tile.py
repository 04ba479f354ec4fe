"""Stage 1 for the large tile on Hopper: the tensor cores stay busy during the softmax.

    S = Q K^T * sm_scale,   LSE = log2 sum_n 2^(S_n * log2 e),   O = softmax(S) V

(FlashForge's PAC, Algorithm 2.) This kernel has the items, arguments and results of
`partial_attention`, for the large tile alone: one KV range to which every query attends. Written in
Gluon, it chooses when each matrix product starts and when it needs the result (FlashAttention-3,
section 3.2: GEMM-softmax pipelining): Q K^T of the next block and P V of this block start together,
and the softmax of the next block runs during P V.

The kernel takes KV blocks from the segment's end to its start. Only the first block, before the
loop, needs a mask for tokens past the end.

Rings of shared-memory buffers hold K and V. K runs LOOKAHEAD blocks ahead of the product that
starts next, and V runs one block behind K. One thread for each token computes where the token lies,
and the threads that copy read that offset: one ring holds page ids, and a second ring holds the
offsets, a few blocks later. One thread for each query vector computes in the same way where the
vector lies and where its result goes. While the kernel writes an item's results, it loads what the
next item needs first: page ids, queries and slots.

Each block meets two barriers. The first one and its proxy fence make all copies visible to the
tensor cores. After the second one, no warp reads the oldest buffers, so copies may overwrite them.
Of a cache of 8 bits, the rings hold bytes, and all threads make operands of the two blocks that are
multiplied next, in two more buffers. A third barrier and its fence make these visible.

Addresses and strides of Q, K and V must be multiples of 16 bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deft_backend.kernels.arguments import Scaling, Strides, Tensors
from deft_backend.kernels.hopper.large_tile_copies import (
    Segment,
    Stream,
    arrived,
    ask_item,
    copy_first_blocks,
    copy_next_blocks,
    copy_queries,
    take_item,
)
from deft_backend.kernels.hopper.large_tile_memory import (
    allocate,
    count_on_sm,
    hidden_zero,
    layout_of,
    spread_number,
)
from deft_backend.kernels.hopper.large_tile_results import (
    add_scores,
    first_product,
    last_product,
    masked,
    softmax,
    start_products,
    write_results,
)
from deft_backend.kernels.hopper.parts import (
    ask_plan,
    capped,
    next_slot,
    plus,
    range_end,
    read_item,
    sees,
    tail_of,
    with_device_scales,
)
from deft_backend.kernels.hopper.versions import barrier, gl, jit, wait_group, warpgroup_mma_wait
from deft_backend.planner.device_plan import ItemArrays


class State(NamedTuple):
    """The softmax of an item's blocks so far."""

    now: Any  # the slot of the V block to multiply next
    following: Any  # the slot of the K block to multiply next
    position: Any  # [tokens]: where the block of unknown offsets lies
    maximum: Any  # [M]
    total: Any  # [M, 4]: sums by thread
    acc: Any  # [M, D]: without the block whose V comes next
    weights: Any  # [M, tokens]: of that block


class Inputs(NamedTuple):
    """What all blocks of an item are added with."""

    q: Any
    stream: Any
    left: Any  # the range's tokens from the first taken block on
    tail: Any
    scaling: Any
    buffers: Any


@jit
def _find_segment(item, tensors, strides):
    """Second link: an item's KV range as it is now."""
    table = tensors.page_table + item.row.to(gl.int64) * strides.table
    return Segment(table, item.start, range_end(item, tensors))


@jit
def _hide(scores, left, tail, tensors, strides, HEADS, TILE, LAYOUT):
    """Scores with -inf where a query token does not see another query token.

    `left` are the range's tokens from the block's first one on.
    """
    row = gl.arange(0, TILE.height, layout=gl.SliceLayout(1, LAYOUT.scores))
    column = gl.arange(0, TILE.block_tokens, layout=gl.SliceLayout(0, LAYOUT.scores))
    query_token = tail.first + row // HEADS.group
    seen = sees(tail.hidden - left, column, query_token, tail, tensors, strides, 1, HEADS)
    return gl.where(seen, scores, float("-inf"))


@jit
def _add_block(state, step, inputs, tensors, strides, HIDES, HEADS, CACHE, TILE, MODE, LAYOUT):
    """The softmax with one more block, while P V of the block taken before it runs.

    With HIDES, some of the block's tokens are query tokens.
    """
    buffers, scaling = inputs.buffers, inputs.scaling
    started, summing = start_products(state, inputs.q, buffers, CACHE, TILE, LAYOUT)
    position = copy_next_blocks(
        step, state.now, state.position, inputs.stream, buffers, CACHE, TILE, LAYOUT
    )
    now, following = state.following, next_slot(state.following, LAYOUT.slots)
    scores = warpgroup_mma_wait(1, deps=[started])
    scores = capped(scores, scaling, MODE.soft_cap)
    if HIDES:
        behind = inputs.left + (step + 1) * TILE.block_tokens
        scores = _hide(scores, behind, inputs.tail, tensors, strides, HEADS, TILE, LAYOUT)
    maximum, total, acc, weights = add_scores(state, scores, summing, inputs, TILE, MODE, LAYOUT)
    return State(now, following, position, maximum, total, acc, weights)


@jit
def hopper_large_tile_attention(
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
    gl.static_assert(LAYOUT.known >= TILE.lookahead + 2)

    ask_plan(plan, LAYOUT)
    buffers = allocate(tensors, HEADS, CACHE, TILE, LAYOUT)
    scaling = with_device_scales(scaling, tensors, MODE)
    factor = scaling.scale
    if MODE.soft_cap:
        factor = 1.0

    gl.static_assert(TILE.place == 0)  # these items come first in the plan
    work_end = gl.load(plan.tile_ptr + 1) * HEADS.num_kv
    offs_d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LAYOUT.copy))
    offs_kv = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LAYOUT.kv_copy))
    first_work = gl.program_id(0)
    step_work = gl.num_programs(0)
    counted = 0
    if TILE.spread:
        counted = count_on_sm(plan.arrivals, LAYOUT)
    item = read_item(first_work, work_end, tensors, plan, HEADS, AHEAD=True)
    if TILE.spread:
        # With more items, most SMs get two anyway, so numbering would not help.
        if (work_end > 0) & (2 * work_end <= step_work):
            first_work = spread_number(plan.arrivals, counted, LAYOUT)
            item = read_item(first_work, work_end, tensors, plan, HEADS, AHEAD=False)
    segment = Segment(tensors.page_table, item.start, item.stop)
    # A program without an item ends here, and only its end lets the next kernel start. Programs
    # that start while idle programs hold some SMs crowd onto the other SMs and stay there.
    if first_work < work_end:
        if MODE.overlapped:
            gdc_launch_dependents()
        segment = _find_segment(item, tensors, strides)
        ask_item(True, item, segment, buffers, plan, HEADS, CACHE, TILE, LAYOUT)

    for work in range(first_work, work_end, step_work):
        # KV heads of one item are neighbours: they read the same page-table entries.
        kv_head = work % HEADS.num_kv
        zero = hidden_zero(item.queries)
        base = kv_head.to(gl.int64) * CACHE.head + offs_kv
        tokens = gl.maximum(segment.stop - segment.start, 0)
        filled = (tokens + BLOCK_N - 1) // BLOCK_N
        blocks = gl.maximum(filled, 1)  # an empty range runs one block, all of it masked

        # Wait until what `ask_item` asked for has arrived, for every thread.
        wait_group(0)
        barrier()
        last, most = take_item(
            segment, kv_head, zero, buffers, tensors, strides, HEADS, CACHE, TILE, LAYOUT
        )
        stream = Stream(
            segment.table, segment.start, most, filled, tensors.k + base, tensors.v + base
        )
        copy_queries(item, zero, tensors.q + offs_d, buffers, HEADS, TILE, LAYOUT)
        position = copy_first_blocks(stream, last, buffers, CACHE, TILE, LAYOUT)

        # Load what the next item needs first while the program works on this item.
        next_item = read_item(work + step_work, work_end, tensors, plan, HEADS, AHEAD=False)
        arrived(2 * TILE.lookahead)
        q = buffers.rows.load(LAYOUT.queries)  # a V block comes where Q is
        scores = first_product(q, buffers, CACHE, TILE, LAYOUT)
        scores = capped(scores, scaling, MODE.soft_cap)
        left = tokens - (blocks - 1) * BLOCK_N  # of the block: the range's last tokens
        scores = masked(scores, left, BLOCK_M, BLOCK_N, LAYOUT)
        hiding = 0  # blocks of the loop that hold query tokens
        tail = 0
        if not HEADS.single:
            tail = tail_of(item, tensors, plan, HEADS)
            hiding = gl.maximum(tail.hidden + BLOCK_N - 1 - left, 0) // BLOCK_N
            hiding = gl.minimum(hiding, blocks - 1)
            if tail.hidden > 0:
                scores = _hide(scores, left, tail, tensors, strides, HEADS, TILE, LAYOUT)

        maximum = gl.full([BLOCK_M], float("-inf"), gl.float32, ROW)
        acc = gl.zeros([BLOCK_M, HEAD_DIM], gl.float32, LAYOUT.output)
        fresh, total, maximum, _ = softmax(scores, maximum, factor, BLOCK_M, BLOCK_N, ROW)
        weights = gl.convert_layout(fresh.to(DTYPE), LAYOUT.weights)
        state = State(0, 1, position, maximum, total, acc, weights)
        inputs = Inputs(q, stream, left, tail, scaling, buffers)
        if not HEADS.single:
            for step in range(0, hiding):
                state = _add_block(
                    state, step, inputs, tensors, strides, True, HEADS, CACHE, TILE, MODE, LAYOUT
                )
        for step in range(hiding, blocks - 1):
            state = _add_block(
                state, step, inputs, tensors, strides, False, HEADS, CACHE, TILE, MODE, LAYOUT
            )

        segment = _find_segment(next_item, tensors, strides)
        arrived(0)
        there = work + step_work < work_end
        ask_item(there, next_item, segment, buffers, plan, HEADS, CACHE, TILE, LAYOUT)
        acc = last_product(state, scaling, buffers, CACHE, LAYOUT)
        sums = gl.convert_layout(gl.reduce(state.total, 1, plus), ROW)
        maximum, zero = state.maximum, hidden_zero(state.now)
        write_results(
            acc, maximum, sums, item, kv_head, zero, buffers, tensors, HEADS, TILE, MODE, LAYOUT
        )
        item = next_item

    if MODE.overlapped:
        gdc_wait()
