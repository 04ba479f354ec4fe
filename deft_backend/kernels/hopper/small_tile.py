"""Stage 1 for the small tile on Hopper: partial attention with loads in flight all the time.

    S = Q K^T * sm_scale,   LSE = log2 sum_n 2^(S_n * log2 e),   O = softmax(S) V

(FlashForge's PAC, Algorithm 2.) This kernel has the items, arguments, results and merges of the
plain `small_tile`, and computes S^T and O^T likewise. What differs:

- The kernel copies K and V into rings of buffers in shared memory, LOOKAHEAD KV blocks ahead of the
  block that it multiplies. The copies go on from one item to the next. Triton's own pipelining ends
  with each item, so this kernel is written in Gluon.
- The kernel starts each load of an item's chain one item or one KV block before the next load. So
  it never waits for a load that has just begun.
- One thread for each token reads its page id and turns it into an address.

The *ordered tile* is this kernel with the large tile's blocks and the large tile's order of blocks
and sums. A partial result of it has the large tile's bits.

Addresses and strides of Q, K and V must be multiples of 16 bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deft_backend.kernels.arguments import Scaling, Strides, Tensors
from deft_backend.kernels.hopper.eight_bits import in_order
from deft_backend.kernels.hopper.parts import (
    next_slot,
    plus,
    read_item,
    tail_of,
    with_device_scales,
)
from deft_backend.kernels.hopper.small_tile_copies import begin_stream, copy_next_block, tokens_of
from deft_backend.kernels.hopper.small_tile_memory import (
    allocate,
    keys_of,
    layout_of,
    place_of_results,
    values_of,
)
from deft_backend.kernels.hopper.small_tile_results import (
    Block,
    add_block,
    merge_results,
    no_tokens,
    write_ordered,
    write_results,
)
from deft_backend.kernels.hopper.versions import barrier, gl, jit, wait_group
from deft_backend.planner.device_plan import ItemArrays


class Own(NamedTuple):
    """The item that a program works on."""

    entry: Any
    queries: Any
    length: Any  # tokens of its KV range
    query: Any
    slot: Any  # query and slot of its first entry
    merged: Any  # partial results that it merges


class Coming(NamedTuple):
    """The item after that one."""

    entry: Any
    queries: Any
    length: Any


@jit
def _own(work, work_end, coming, plan, HEADS):
    """Read what an item needs at its end."""
    query = gl.load(plan.entry_query + coming.entry)
    slot = gl.load(plan.entry_slot + coming.entry)
    number = work // HEADS.num_kv
    merged = gl.load(plan.segment_span + number, mask=work < work_end, other=0)
    return Own(coming.entry, coming.queries, coming.length, query, slot, merged)


@jit
def _coming(item, tensors):
    return Coming(item.entry, item.queries, tokens_of(item, tensors))


@jit
def hopper_small_tile_attention(
    tensors: Tensors,
    plan: ItemArrays,
    scaling: Scaling,
    strides: Strides,
    HEADS: gl.constexpr,
    CACHE: gl.constexpr,
    TILE: gl.constexpr,
    MODE: gl.constexpr,
):
    EXPONENT_BITS: gl.constexpr = CACHE.exponent_bits
    LAYOUT: gl.constexpr = layout_of(
        HEADS.dim, HEADS.vectors, TILE.height, TILE.lookahead, CACHE.exponent_bits
    )
    gl.static_assert(gl.num_warps() == 1)
    if MODE.overlapped:
        gdc_launch_dependents()
    buffers = allocate(tensors, HEADS, TILE, LAYOUT)
    scaling = with_device_scales(scaling, tensors, MODE)

    work_end = gl.load(plan.tile_ptr + TILE.place + 1) * HEADS.num_kv
    work = gl.load(plan.tile_ptr + TILE.place) * HEADS.num_kv + gl.program_id(0)
    step = gl.num_programs(0)
    item = read_item(work, work_end, tensors, plan, HEADS, AHEAD=False)
    next_item = read_item(work + step, work_end, tensors, plan, HEADS, AHEAD=False)
    link = read_item(work + 2 * step, work_end, tensors, plan, HEADS, AHEAD=False)
    last_item = read_item(work + 3 * step, work_end, tensors, plan, HEADS, AHEAD=False)
    stream = begin_stream(
        work, item, next_item, link, last_item, tensors, plan, strides, HEADS, CACHE, TILE, LAYOUT
    )

    # The item that is worked on, the one after it, and the first link of a third.
    own = _own(work, work_end, _coming(item, tensors), plan, HEADS)
    coming = _coming(next_item, tensors)
    left = own.length  # tokens of it that are to be worked on
    tail = 0
    if not HEADS.single:
        tail = tail_of(item, tensors, plan, HEADS)
        next_tail = tail_of(next_item, tensors, plan, HEADS)
    online = no_tokens(HEADS, TILE, LAYOUT)
    now = 0  # the slot of the block that is worked on
    q_now = 0
    begun = 0
    while work < work_end:
        barrier()  # whatever was read from the buffers that are copied to now
        stream = copy_next_block(
            stream, step, work_end, buffers, tensors, plan, strides, HEADS, CACHE, TILE, LAYOUT
        )
        begun += 1
        if begun > TILE.lookahead:
            wait_group(TILE.lookahead)
            barrier()
            q, k, v = buffers.q.index(q_now), keys_of(buffers, now), values_of(buffers, now)
            here = left
            if TILE.ordered:  # the block's number is that of the blocks behind it
                behind = gl.maximum((left + TILE.block_tokens - 1) // TILE.block_tokens - 1, 0)
                here = own.length - behind * TILE.block_tokens
            block = Block(q, k, v, here)
            online = add_block(
                online, block, tail, tensors, scaling, strides, HEADS, CACHE, TILE, MODE, LAYOUT
            )
            place = place_of_results(buffers, now, TILE, LAYOUT)
            now = next_slot(now, LAYOUT.slots)
            left -= TILE.block_tokens
            if left <= 0:
                kv_head = work % HEADS.num_kv
                acc = in_order(online.acc, EXPONENT_BITS)
                if EXPONENT_BITS > 0:
                    acc = acc * scaling.value
                barrier()  # K and V have been read
                place.permute((1, 0)).store(acc)
                buffers.maximum.store(online.maximum)
                buffers.total.store(gl.reduce(online.total, 0, plus))
                barrier()
                if TILE.ordered:
                    write_ordered(own, kv_head, place, buffers, tensors, plan, HEADS, TILE, LAYOUT)
                elif own.merged > 0:
                    if MODE.overlapped:
                        gdc_wait()
                    merge_results(
                        own, kv_head, place, buffers, tensors, strides, HEADS, TILE, MODE, LAYOUT
                    )
                else:
                    write_results(
                        own,
                        kv_head,
                        place,
                        buffers,
                        tensors,
                        plan,
                        strides,
                        HEADS,
                        TILE,
                        MODE,
                        LAYOUT,
                    )
                work += step
                q_now = next_slot(q_now, LAYOUT.slots)
                own = _own(work, work_end, coming, plan, HEADS)
                coming = _coming(link, tensors)
                if not HEADS.single:
                    tail = next_tail
                    next_tail = tail_of(link, tensors, plan, HEADS)
                link = read_item(work + 2 * step, work_end, tensors, plan, HEADS, AHEAD=False)
                left = own.length
                online = no_tokens(HEADS, TILE, LAYOUT)

    wait_group(0)
    if MODE.overlapped:
        # The next launch waits for this one alone, so a program must wait for the launch before.
        # Of the ordered tile's programs, the first does: the others leave their SMs.
        if (not TILE.ordered) | (gl.program_id(0) == 0):
            gdc_wait()
