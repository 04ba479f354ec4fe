"""What the kernels in Gluon share: items, where query vectors lie, and what they see.

Who sees whom is as in ``plain/parts.py``. Only leaves hold query tokens, and an item of a leaf has
one query block. So a few numbers of the item tell what its query vectors see.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from deft_backend.kernels.arguments import Scaling
from deft_backend.kernels.hopper.versions import barrier, fence_async_shared, gl, jit


class Item(NamedTuple):
    """What the plan says about an item of one KV range."""

    entry: Any  # its first entry
    queries: Any
    request: Any  # the request that the range's tokens belong to
    row: Any  # the range's row of the page table
    start: Any
    stop: Any  # where the range ends; OPEN_END for an open one


@jit
def ask(pointer, mask):
    """Prefetch addresses to the L2 cache, where `mask` is set. Nothing waits for the prefetch."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred wanted;
        setp.ne.s32 wanted, $2, 0;
        @wanted prefetch.global.L2 [$1];
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [pointer, mask.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def ask_plan(plan, LAYOUT):
    """Bring the plan's arrays, views of one buffer from `tile_ptr` to `entry_slot`, to the L2,
    together with all other programs.
    """
    LINE: gl.constexpr = 16  # numbers in 64 bytes
    lines = (plan.entry_slot.to(gl.int64) - plan.tile_ptr.to(gl.int64)) // 64
    thread = gl.arange(0, 32 * gl.num_warps(), layout=LAYOUT.each)
    line = gl.program_id(0) + gl.num_programs(0) * thread
    ask(plan.tile_ptr + line * LINE, line < lines)


@jit
def larger(a, b):
    return gl.maximum(a, b)


@jit
def plus(a, b):
    return a + b


@jit
def with_device_scales(scaling, tensors, MODE):
    """The scaling, times the scales of an 8-bit cache that the device holds."""
    scale, value = scaling.scale, scaling.value
    if MODE.device_scales:
        scale *= gl.load(tensors.k_scale)
        value *= gl.load(tensors.v_scale)
    return Scaling(scale, scaling.cap, value)


@jit
def capped(scores, scaling, SOFT_CAP):
    """Scores under the soft cap, in base 2; without a soft cap, the scores as they are."""
    if SOFT_CAP:
        # tanh through exp: saturates to +-1 without overflow in either direction.
        LOG2_E: gl.constexpr = 1.4426950408889634
        doubled = gl.exp2(scores * (scaling.scale * 2.0 * LOG2_E / scaling.cap))
        cap = scaling.cap * LOG2_E
        scores = gl.fma(-2.0 * cap, 1.0 / (doubled + 1.0), cap)
    return scores


@jit
def weights_of(scores, factor, reference):
    """``2^(scores * factor - reference)``.

    Each multiply-add is written as one. Otherwise the compiler would choose, and kernels whose bits
    must be equal would round differently.
    """
    return gl.exp2(gl.fma(scores, factor, -reference))


@jit
def sink_weight(sinks, head, there, maximum):
    """The weight of each query vector's sink, among weights relative to `maximum`, in base 2.

    Without a token `maximum` is -inf: then any finite weight gives an output of 0.
    """
    LOG2_E: gl.constexpr = 1.4426950408889634
    sink = gl.load(sinks + head, mask=there, other=0).to(gl.float32) * LOG2_E
    return gl.exp2(sink - gl.where(maximum == float("-inf"), 0.0, maximum))


@jit
def _listed(pointer, there, AHEAD):
    """A number of an item, 0 if the item is not there.

    With AHEAD, the load starts before `there` is known. It is volatile, because the compiler would
    otherwise move it behind the load of `there`.
    """
    if AHEAD:
        return gl.where(there, gl.load(pointer, volatile=True), 0)
    else:
        return gl.load(pointer, mask=there, other=0)


@jit
def read_item(work, work_end, tensors, plan, HEADS, AHEAD):
    """First link of the chain of loads: the item of `work`, which is an item and a KV head.

    From `work_end` on, items are empty. With AHEAD, the item is one of the READ_AHEAD items for
    which every plan has room.
    """
    number = work // HEADS.num_kv  # of the item and of its only segment
    there = work < work_end
    entry = _listed(plan.item_query_ptr + number, there, AHEAD)
    entry_end = _listed(plan.item_query_ptr + number + 1, there, AHEAD)
    request = _listed(plan.segment_request + number, there, AHEAD)
    row = _listed(tensors.table_rows + number, there, AHEAD)
    start = _listed(plan.segment_start + number, there, AHEAD)
    stop = _listed(plan.segment_end + number, there, AHEAD)
    return Item(entry, entry_end - entry, request, row, start, stop)


@jit
def range_end(item, tensors):
    """End of an item's KV range: an open range ends where its request's sequence ends now."""
    length = gl.load(tensors.seq_lens + item.request, mask=item.stop < 0, other=0).to(gl.int32)
    return gl.where(item.stop < 0, length, item.stop)


@jit
def offsets_of(page, position, CACHE):
    """Offsets of tokens in K and V, in units of 16 bytes: 32 bits of these units reach 64 GiB."""
    UNIT: gl.constexpr = 16 if CACHE.exponent_bits > 0 else 8
    gl.static_assert(CACHE.page % UNIT == 0)
    gl.static_assert(CACHE.token % UNIT == 0)
    offset = page * (CACHE.page // UNIT)
    if CACHE.page_size > 1:
        in_page = (position.to(gl.uint32) % CACHE.page_size).to(gl.int32)
        offset += in_page * (CACHE.token // UNIT)
    return offset


@jit
def next_slot(slot, SLOTS):
    """The slot after this one in a ring."""
    return gl.where(slot == SLOTS - 1, 0, slot + 1)


@jit
def show_operands():
    """Show what all threads stored to shared memory to the tensor cores."""
    fence_async_shared()
    barrier()


class Places(NamedTuple):
    """Where query vectors lie: [M] numbers."""

    row: Any  # in `q` and in the output
    head: Any  # query head
    result: Any  # place among the query vectors of a partial result
    there: Any  # whether there is such a query token


class Tail(NamedTuple):
    """What an item's query vectors see of the query tokens at the end of its KV range."""

    hidden: Any  # tokens from the request's first query token on; 0 or less if there are none
    request: Any
    first: Any  # first query token of the item's query block


@jit
def places_of(query, vector, there, kv_head, tensors, HEADS):
    """Where the query vectors of query blocks lie; `vector` counts those of one block."""
    if HEADS.single:
        row = query
        head = kv_head * HEADS.group + vector
        result = head
    else:
        head = kv_head * HEADS.group + vector % HEADS.group
        result = vector // HEADS.group * (HEADS.num_kv * HEADS.group) + head
        request = query // HEADS.blocks
        token = query % HEADS.blocks * HEADS.tokens + vector // HEADS.group
        if HEADS.ragged:
            first = gl.load(tensors.query_start + request)
            there = there & (token < gl.load(tensors.query_start + request + 1) - first)
        else:
            first = request * HEADS.query_tokens
            there = there & (token < HEADS.query_tokens)
        row = gl.where(there, first + token, 0)  # a row that exists
    return Places(row, head, result, there)


@jit
def tail_of(item, tensors, plan, HEADS):
    """What an item's query vectors see of its range's last tokens."""
    length = gl.load(tensors.seq_lens + item.request).to(gl.int32)
    hidden = gl.where(item.stop < 0, length, item.stop) - length
    if HEADS.ragged:
        hidden += gl.load(tensors.query_start + item.request + 1)
        hidden -= gl.load(tensors.query_start + item.request)
    else:
        hidden += HEADS.query_tokens
    first = hidden * 0
    if HEADS.blocks > 1:
        first = gl.load(plan.entry_query + item.entry) % HEADS.blocks * HEADS.tokens
    return Tail(hidden, item.request, first)


@jit
def _seen_bits(first, query_token, tail, tensors, strides, HEADS):
    """[M] uint64: bit ``i`` is set if query tokens [M] see query token ``first + i``; all see
    tokens before the query tokens, which have negative numbers, from -63 on.
    """
    WORDS: gl.constexpr = (HEADS.query_tokens + 63) // 64
    word = gl.maximum(first, 0) // 64
    at = tail.request.to(gl.int64) * strides.ancestors_batch
    at += gl.minimum(query_token, HEADS.query_tokens - 1) * strides.ancestors_token
    some = query_token >= 0
    low = gl.load(tensors.ancestors + at + word, mask=some & (word < WORDS), other=0)
    shift = (gl.maximum(first, 0) % 64).to(gl.uint64)
    bits = low.to(gl.uint64) >> shift
    if WORDS > 1:
        high = gl.load(tensors.ancestors + at + word + 1, mask=some & (word + 1 < WORDS), other=0)
        # A shift by all 64 bits is undefined.
        bits |= (high.to(gl.uint64) << (shift * 0 + 1)) << (shift * 0 + 63 - shift)
    before = gl.maximum(0 - first, 0).to(gl.uint64)
    one = before * 0 + 1
    return (bits << before) | ((one << before) - one)


@jit
def sees(first, index, query_token, tail, tensors, strides, AXIS, HEADS):
    """Whether query tokens see the tokens of a block: [M, N] with AXIS 1, or [N, M] with AXIS 0.

    `index` [N] counts the block's tokens, the first of which is query token `first` of the request.
    """
    columns = gl.expand_dims(index, 1 - AXIS)
    if HEADS.tree:
        bits = _seen_bits(first, query_token, tail, tensors, strides, HEADS)
        seen = (gl.expand_dims(bits, AXIS) >> columns.to(gl.uint64)).to(gl.int32) % 2 != 0
    else:
        seen = columns + first <= gl.expand_dims(query_token, AXIS)
    return seen
