"""Stage 1 for the large tile on Hopper: the tensor cores stay busy during the softmax.

    S = Q K^T * sm_scale,   LSE = log2 sum_n 2^(S_n * log2 e),   O = softmax(S) V

(FlashForge's PAC, Algorithm 2.) This kernel has the items, arguments and results of
`partial_attention`, for the large tile alone: one KV range to which every query attends. Written in
Gluon, it chooses when each matrix product starts and when it needs the result (FlashAttention-3,
section 3.2: GEMM-softmax pipelining): Q K^T of the next block and P V of this block start together,
and the softmax of the next block runs during P V.

The kernel takes KV blocks from the range's end to its start. Only the first block, before the
loop, needs a mask for tokens past the end.

Rings of shared-memory buffers hold K and V. K runs LOOKAHEAD blocks ahead of the product that
starts next, and V runs one block behind K. One thread for each token computes where the token lies,
and the threads that copy read that offset: one ring holds page ids, and a second ring holds the
offsets, a few blocks later. One thread for each query vector computes in the same way where the
vector lies and where its result goes.

Copies of the next item start before an item ends, so memory is never idle between the two. After
an item's first block, the kernel loads what the next item needs first: page ids, queries and slots.
Shortly before the item's last block, it prefetches the next item's first blocks to the L2 cache.
After the last block, it copies the next item's first K, and only then writes the item's results.

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
    arrived,
    ask_item,
    copy_first_blocks,
    copy_first_keys,
    copy_next_blocks,
    copy_queries,
    last_begin,
    prefetch_item,
    stream_of,
    take_pages,
    take_queries,
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
    Item,
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
from deft_backend.kernels.hopper.versions import (
    barrier,
    commit_group,
    gl,
    jit,
    wait_group,
    warpgroup_mma_wait,
)
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
def _bounded(item, tensors):
    """Second link: an item whose range ends where it ends now."""
    stop = range_end(item, tensors)
    return Item(item.entry, item.queries, item.request, item.row, item.start, stop)


@jit
def _begin(stream, buffers, CACHE, TILE, LAYOUT):
    """Start copying an item's first keys; the page ids that `ask_item` asked for have arrived."""
    take_pages(stream, buffers, CACHE, TILE, LAYOUT)
    copy_first_keys(stream, buffers, LAYOUT)


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
    # A program without an item ends here, and only its end lets the next kernel start. Programs
    # that start while idle programs hold some SMs crowd onto the other SMs and stay there.
    if first_work < work_end:
        if MODE.overlapped:
            gdc_launch_dependents()
        item = _bounded(item, tensors)
        kv_head = first_work % HEADS.num_kv
        stream = stream_of(item, kv_head, tensors, strides, HEADS, CACHE, TILE, LAYOUT)
        ask_item(True, item, stream, buffers, plan, HEADS, CACHE, TILE, LAYOUT)
        commit_group()
        wait_group(0)
        barrier()
        _begin(stream, buffers, CACHE, TILE, LAYOUT)

    for work in range(first_work, work_end, step_work):
        # KV heads of one item are neighbours: they read the same page-table entries.
        kv_head = work % HEADS.num_kv
        zero = hidden_zero(item.queries)
        stream = stream_of(item, kv_head, tensors, strides, HEADS, CACHE, TILE, LAYOUT)
        blocks = gl.maximum(stream.filled, 1)  # an empty range runs one block, all of it masked

        take_queries(kv_head, zero, buffers, tensors, strides, HEADS, TILE, LAYOUT)
        copy_queries(item, zero, tensors.q + offs_d, buffers, HEADS, TILE, LAYOUT)
        position = copy_first_blocks(stream, buffers, CACHE, TILE, LAYOUT)

        # Load what the next item needs first while the program works on this item.
        next_item = read_item(work + step_work, work_end, tensors, plan, HEADS, AHEAD=False)
        arrived(2 * TILE.lookahead - 1)  # K of the first block was copied before Q
        next_item = _bounded(next_item, tensors)
        q = buffers.rows.load(LAYOUT.queries)  # a V block comes where Q is
        scores = first_product(q, buffers, CACHE, TILE, LAYOUT)
        scores = capped(scores, scaling, MODE.soft_cap)
        # The block holds the range's last tokens.
        left = gl.maximum(item.stop - last_begin(stream, BLOCK_N), 0)
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
        there = work + step_work < work_end
        next_head = (work + step_work) % HEADS.num_kv
        following = stream_of(next_item, next_head, tensors, strides, HEADS, CACHE, TILE, LAYOUT)
        ask_item(there, next_item, following, buffers, plan, HEADS, CACHE, TILE, LAYOUT)
        # These copies join the group of step 0, which has arrived when step STEPS begins. In the
        # last STEPS steps, the item has hardly anything left to copy.
        STEPS: gl.constexpr = TILE.lookahead + 1
        late = gl.maximum(gl.maximum(blocks - 1 - STEPS, STEPS), hiding)
        late = gl.where(there, late, -1)
        if not HEADS.single:
            for step in range(0, hiding):
                state = _add_block(
                    state, step, inputs, tensors, strides, True, HEADS, CACHE, TILE, MODE, LAYOUT
                )
        for step in range(hiding, blocks - 1):
            if step == late:
                anew = hidden_zero(state.now)
                prefetch_item(
                    following, next_head, anew, buffers, tensors, HEADS, CACHE, TILE, LAYOUT
                )
            state = _add_block(
                state, step, inputs, tensors, strides, False, HEADS, CACHE, TILE, MODE, LAYOUT
            )

        commit_group()  # an item of one block has not ended the group of `ask_item` yet
        arrived(0)
        _begin(following, buffers, CACHE, TILE, LAYOUT)
        acc = last_product(state, scaling, buffers, CACHE, LAYOUT)
        sums = gl.convert_layout(gl.reduce(state.total, 1, plus), ROW)
        maximum, zero = state.maximum, hidden_zero(state.now)
        write_results(
            acc, maximum, sums, item, kv_head, zero, buffers, tensors, HEADS, TILE, MODE, LAYOUT
        )
        item = next_item

    wait_group(0)  # the last item has begun an item that is not there
    if MODE.overlapped:
        gdc_wait()
