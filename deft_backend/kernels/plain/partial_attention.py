"""Stage 1 for large and masked tiles: partial attention (FlashForge's PAC, Algorithm 2).

For an item with queries Q and KV ranges K, V the kernel computes

    S   = Q K^T * sm_scale            (soft-capped: cap * tanh(S / cap))
    LSE = log2 sum_n 2^(S_n * log2 e)
    O   = softmax(S) V

with an online softmax over KV blocks and float32 accumulation (DeFT, section 3.1). A block is
loaded once for every query of the tile and every query head of its GQA group: a query
vector of the tile is a (query token, head of the GQA group) pair. `small_tile` runs the small
tiles.

An item's KV is a list of segments. Every query of the tile attends to the only segment of a large
tile. All may attend to the first segment of a masked tile. A loop without masks takes the whole KV
blocks of such a segment. A shared prefix spends most of its time there. A second loop takes all
other segments (DeFT's flattened nodes). It finds each token's segment and masks the queries outside
the segment's span. In forest order the queries of a span are one run, as DeFT's bit mask is a run
of ones. So two small integers hold the span.

Both loops hold the page ids of the block that they load next in registers. So the loads of K and V,
which the compiler pipelines, depend on no other load.

Programs are persistent. They read on the device how many items there are, and take every
``num_programs``-th. So one kernel configuration serves every plan. Launches of large and masked
tiles do not depend on one another. Each lets the next launch start at once (programmatic dependent
launch) and ends only after the one before it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton import jit
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deft_backend.kernels.arguments import Scaling, Strides, Tensors
from deft_backend.kernels.plain.eight_bits import operand
from deft_backend.kernels.plain.parts import (
    Online,
    Segment,
    capped,
    kv_offsets,
    load_queries,
    locate,
    rest_of,
    seen_by_all,
    sees,
    tail_of,
    vectors_of,
    with_device_scales,
    write_results,
)
from deft_backend.planner import encoding
from deft_backend.planner.device_plan import ItemArrays


class Item(NamedTuple):
    """What the plan says of an item."""

    entry: Any  # its first entry
    queries: Any
    first_segment: Any
    segments: Any


class Inputs(NamedTuple):
    """What all blocks of an item are added with."""

    q: Any  # [M, D]
    k_head: Any
    v_head: Any  # the first token of the KV head in the cache
    query_of_row: Any  # [M]: of each query vector, counted from the item's first query
    tail: Any


@jit
def _attend(online, q, k, v, allowed, scaling, MASKED, CACHE, MODE):
    """The softmax with one more block: q [M, D], k and v [N, D].

    If MASKED, query vector m attends to token n where ``allowed[m, n]``.
    """
    k = operand(k, q.dtype, CACHE.exponent_bits, MODE.upcast)
    v = operand(v, q.dtype, CACHE.exponent_bits, MODE.upcast)
    scores = tl.dot(q, tl.trans(k))
    scores, factor = capped(scores, scaling, MODE.soft_cap)
    if MASKED:
        scores = tl.where(allowed, scores, float("-inf"))
    # The threads of a warpgroup hold pairs of columns, eight apart. Several short chains of
    # operations take less time than one chain over all columns of a thread.
    M: tl.constexpr = scores.shape[0]
    CHAINS: tl.constexpr = scores.shape[1] // 16
    chains = tl.reshape(scores, [M, 2, CHAINS, 8])
    chains = tl.reshape(tl.reduce(chains, 2, tl.standard._elementwise_max), [M, 16])
    highest = tl.reduce(chains, 1, tl.standard._elementwise_max) * factor
    maximum = tl.maximum(online.maximum, highest)
    if MASKED:
        # A query vector that has seen no token keeps its maximum at -inf: avoid -inf - -inf.
        reference = tl.where(maximum == float("-inf"), 0.0, maximum)
    else:
        reference = maximum
    weights = tl.exp2(scores * factor - reference[:, None])
    rescale = tl.exp2(online.maximum - reference)
    chains = tl.reshape(weights, [M, 2, CHAINS, 8])
    chains = tl.reshape(tl.reduce(chains, 2, tl.standard._sum_combine), [M, 16])
    total = online.total * rescale + tl.reduce(chains, 1, tl.standard._sum_combine)
    acc = online.acc * rescale[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc)
    return Online(acc, maximum, total)


@jit
def _read_item(number, plan, TILE):
    if TILE.block_segments > 1:
        first_segment = tl.load(plan.item_segment_ptr + number)
        segments = tl.load(plan.item_segment_ptr + number + 1) - first_segment
    else:  # each item of this tile shape, and of those before it in the plan, has one segment
        first_segment = number
        segments = 1
    entry = tl.load(plan.item_query_ptr + number)
    queries = tl.load(plan.item_query_ptr + number + 1) - entry
    return Item(entry, queries, first_segment, segments)


@jit
def _first_segment(item, tensors, plan, strides, TILE):
    """The item's first segment if every query attends to it, and else an empty one."""
    request = tl.load(plan.segment_request + item.first_segment)
    start = tl.load(plan.segment_start + item.first_segment)
    stop = tl.load(plan.segment_end + item.first_segment)
    if stop < 0:  # open: it ends where its request's sequence ends now
        stop = tl.load(tensors.seq_lens + request).to(tl.int32)
    table_row = tl.load(tensors.table_rows + item.first_segment).to(tl.int64)
    table = tensors.page_table + table_row * strides.table
    length = tl.maximum(stop - start, 0)
    if TILE.block_segments > 1:
        SPAN_SHIFT: tl.constexpr = encoding.SPAN_SHIFT
        if tl.load(plan.segment_span + item.first_segment) != item.queries << SPAN_SHIFT:
            length = 0
    return Segment(table, start, length)


@jit
def _attend_whole(online, inputs, segment, clear, tensors, scaling, HEADS, CACHE, TILE, MODE):
    """The softmax with a segment that every query attends to: whole blocks, then the last tokens.

    Every query vector sees the segment's first `clear` tokens; `tail` tells who sees the others.
    The page ids of the block that is loaded next are in registers: so the loads of K and V, which
    the compiler pipelines, depend on no other load.
    """
    offs_n = tl.arange(0, TILE.block_tokens)
    offs_d = tl.arange(0, HEADS.padded_dim)[None, :]
    in_head = offs_d < HEADS.dim
    q, k_head, v_head = inputs.q, inputs.k_head, inputs.v_head
    table, start, length = segment.table, segment.start, segment.length
    done = clear // TILE.block_tokens * TILE.block_tokens
    page = tl.load(table + (start + offs_n) // CACHE.page_size, mask=offs_n < length, other=0)
    for begin in range(0, done, TILE.block_tokens):
        offset = kv_offsets(page, start + begin + offs_n, CACHE)
        k = tl.load(k_head + offset[:, None] + offs_d, mask=in_head, other=0)
        v = tl.load(v_head + offset[:, None] + offs_d, mask=in_head, other=0)
        ahead = begin + TILE.block_tokens + offs_n
        page = tl.load(table + (start + ahead) // CACHE.page_size, mask=ahead < length, other=0)
        online = _attend(online, q, k, v, True, scaling, False, CACHE, MODE)
    # Few blocks, so no pipeline: the bits of trees would take as much shared memory as keys do. One
    # block of a single query token: outside a loop, its loads would spill the registers of mma v2.
    for begin in tl.range(done, length, TILE.block_tokens, num_stages=1):
        inside = offs_n < length - begin
        position = start + begin + offs_n
        offset = kv_offsets(page, position, CACHE)
        present = inside[:, None] & in_head
        k = tl.load(k_head + offset[:, None] + offs_d, mask=present, other=0)
        v = tl.load(v_head + offset[:, None] + offs_d, mask=present, other=0)
        allowed = inside[None, :]
        if not HEADS.single:
            ahead = begin + TILE.block_tokens + offs_n
            page = tl.load(table + (start + ahead) // CACHE.page_size, mask=ahead < length, other=0)
            allowed &= sees(position, inputs.tail, tensors, HEADS)
        online = _attend(online, q, k, v, allowed, scaling, True, CACHE, MODE)
    return online


@jit
def _attend_rest(online, inputs, rest, tensors, plan, scaling, strides, HEADS, CACHE, TILE, MODE):
    """The softmax with an item's remaining tokens, each for the queries in its segment's span."""
    SPAN_SHIFT: tl.constexpr = encoding.SPAN_SHIFT
    SPAN_MASK: tl.constexpr = encoding.SPAN_MASK
    offs_n = tl.arange(0, TILE.block_tokens)
    offs_d = tl.arange(0, HEADS.padded_dim)[None, :]
    in_head = offs_d < HEADS.dim
    q, k_head, v_head = inputs.q, inputs.k_head, inputs.v_head
    query_of_row = inputs.query_of_row
    page, token, span = locate(offs_n, rest, tensors, plan, strides, CACHE)
    for begin in range(0, rest.tokens, TILE.block_tokens):
        offset = kv_offsets(page, token, CACHE)
        present = (begin + offs_n < rest.tokens)[:, None] & in_head
        k = tl.load(k_head + offset[:, None] + offs_d, mask=present, other=0)
        v = tl.load(v_head + offset[:, None] + offs_d, mask=present, other=0)
        # Tokens outside the item have span 0: no query attends to them.
        allowed = (query_of_row[:, None] >= (span & SPAN_MASK)[None, :]) & (
            query_of_row[:, None] < (span >> SPAN_SHIFT)[None, :]
        )
        if not HEADS.single:
            allowed &= sees(token, inputs.tail, tensors, HEADS)
        ahead = begin + TILE.block_tokens + offs_n
        page, token, span = locate(ahead, rest, tensors, plan, strides, CACHE)
        online = _attend(online, q, k, v, allowed, scaling, True, CACHE, MODE)
    return online


@jit
def partial_attention(
    tensors: Tensors,
    plan: ItemArrays,
    scaling: Scaling,
    strides: Strides,
    HEADS: tl.constexpr,
    CACHE: tl.constexpr,
    TILE: tl.constexpr,
    MODE: tl.constexpr,
):
    if MODE.overlapped:
        gdc_launch_dependents()

    scaling = with_device_scales(scaling, tensors, MODE)
    first_item = tl.load(plan.tile_ptr + TILE.place)
    work_end = tl.load(plan.tile_ptr + TILE.place + 1) * HEADS.num_kv
    offs_m = tl.arange(0, TILE.height)
    query_of_row = offs_m // HEADS.vectors

    for work in range(first_item * HEADS.num_kv + tl.program_id(0), work_end, tl.num_programs(0)):
        # KV heads of one item are neighbours: they read the same page-table entries.
        kv_head = work % HEADS.num_kv
        item = _read_item(work // HEADS.num_kv, plan, TILE)
        vectors = vectors_of(item.entry, item.queries, kv_head, tensors, plan, HEADS, TILE)
        q = load_queries(tensors, strides, vectors, HEADS, MODE.upcast)
        online = Online(
            tl.full([TILE.height, HEADS.padded_dim], 0.0, tl.float32),
            tl.full([TILE.height], float("-inf"), tl.float32),
            tl.full([TILE.height], 0.0, tl.float32),
        )
        head = kv_head.to(tl.int64) * CACHE.head
        k_head, v_head = tensors.k + head, tensors.v + head

        segment = _first_segment(item, tensors, plan, strides, TILE)
        tail, clear = 0, segment.length
        if not HEADS.single:
            tail = tail_of(item.entry, item.queries, tensors, plan, strides, HEADS, TILE)
            clear = seen_by_all(tail, vectors.there, segment.start, segment.length)
        inputs = Inputs(q, k_head, v_head, query_of_row, tail)
        online = _attend_whole(
            online, inputs, segment, clear, tensors, scaling, HEADS, CACHE, TILE, MODE
        )
        if TILE.block_segments > 1:
            rest = rest_of(item, segment.length, tensors, plan, TILE)
            online = _attend_rest(
                online, inputs, rest, tensors, plan, scaling, strides, HEADS, CACHE, TILE, MODE
            )

        if CACHE.exponent_bits > 0:
            online = Online(online.acc * scaling.value, online.maximum, online.total)
        # Read again: held in registers through the loops, they would cost more.
        vectors = vectors_of(item.entry, item.queries, kv_head, tensors, plan, HEADS, TILE)
        in_tile = query_of_row < item.queries
        slot = tl.load(plan.entry_slot + item.entry + query_of_row, mask=in_tile, other=0)
        write_results(online, vectors, slot, tensors, strides, HEADS, MODE)

    if MODE.overlapped:
        gdc_wait()
