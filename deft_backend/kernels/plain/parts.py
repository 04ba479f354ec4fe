"""Parts of the plain kernels: scores, sinks, how queries and results move, who sees a token.

A request's last tokens are its query tokens, n of them. All query vectors see the tokens before
these. A query token of a chain also sees itself and the query tokens before it. A query token of a
tree sees its ancestors among the query tokens, by the bits in `ancestors` (DeFT, Remark 3.1).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton import jit

from deft_backend.kernels.arguments import Scaling


class Online(NamedTuple):
    """The softmax of an item's tokens so far, for M query vectors."""

    acc: Any  # sums of values, weighted by ``2^(score - maximum)``: [M, D], or transposed
    maximum: Any  # [M]: largest scores, in base 2
    total: Any  # [M]: sums of weights


class Segment(NamedTuple):
    """A KV range."""

    table: Any  # its row of the page table
    start: Any
    length: Any


class Vectors(NamedTuple):
    """The query vectors of a tile: [M] numbers."""

    row: Any  # index of its query token in `q` and in the output
    head: Any  # its query head
    result: Any  # its place among the query vectors of a partial result
    there: Any  # whether the tile holds it


class Tail(NamedTuple):
    """What each query vector of a tile sees of its request's query tokens: [M] numbers."""

    before: Any  # position of the request's first query token
    token: Any  # the vector's query token
    bits: Any  # where the token's bits lie in `ancestors`


@jit
def block_of(query, HEADS):
    """Request of a query block, and the first query token of the block."""
    return query // HEADS.blocks, query % HEADS.blocks * HEADS.tokens


@jit
def rows_of(request, there, query_start, HEADS):
    """Index in `q` of a request's first query token, and the number of its query tokens."""
    if HEADS.ragged:
        first = tl.load(query_start + request, mask=there, other=0)
        tokens = tl.load(query_start + request + 1, mask=there, other=0) - first
    else:
        first = request * HEADS.query_tokens
        tokens = HEADS.query_tokens
    return first, tokens


@jit
def vectors_of(entry, queries, kv_head, tensors, plan, HEADS, TILE):
    """The query vectors of an item's tile, from its first entry on."""
    offs_m = tl.arange(0, TILE.height)
    there = offs_m // HEADS.vectors < queries
    query = tl.load(plan.entry_query + entry + offs_m // HEADS.vectors, mask=there, other=0)
    if HEADS.single:
        row = query
        head = kv_head * HEADS.group + offs_m % HEADS.group
        result = head
    else:
        vector = offs_m % HEADS.vectors
        head = kv_head * HEADS.group + vector % HEADS.group
        result = vector // HEADS.group * (HEADS.num_kv * HEADS.group) + head
        request, token = block_of(query, HEADS)
        token += vector // HEADS.group
        first, tokens = rows_of(request, there, tensors.query_start, HEADS)
        row = first + token
        there = there & (token < tokens)
    return Vectors(row, head, result, there)


@jit
def tail_of(entry, queries, tensors, plan, strides, HEADS, TILE):
    """What the query vectors of an item's tile see of their requests' query tokens."""
    offs_m = tl.arange(0, TILE.height)
    there = offs_m // HEADS.vectors < queries
    query = tl.load(plan.entry_query + entry + offs_m // HEADS.vectors, mask=there, other=0)
    request, token = block_of(query, HEADS)
    token += offs_m % HEADS.vectors // HEADS.group
    _, tokens = rows_of(request, there, tensors.query_start, HEADS)
    length = tl.load(tensors.seq_lens + request, mask=there, other=0).to(tl.int32)
    bits = request.to(tl.int64) * strides.ancestors_batch
    bits += tl.minimum(token, HEADS.query_tokens - 1) * strides.ancestors_token
    return Tail(length - tokens, token, bits)


@jit
def seen_by_all(tail, there, start, length):
    """How many of a range's first tokens all query vectors of the tile see."""
    first = tl.reduce(tl.where(there, tail.before, 1 << 30), 0, tl.standard._elementwise_min)
    return tl.minimum(tl.maximum(first - start, 0), length)


@jit
def sees(position, tail, tensors, HEADS):
    """[M, N] whether query vectors see the tokens at positions [N] of their requests."""
    token = position[None, :] - tail.before[:, None]  # from 0: one of the query tokens
    if HEADS.tree:
        is_query = (token >= 0) & (token < HEADS.query_tokens)
        word_at = tail.bits[:, None] + (tl.maximum(token, 0) >> 6)
        word = tl.load(tensors.ancestors + word_at, mask=is_query, other=0)
        bit = (word >> (token & 63).to(tl.int64)) & 1
        seen = (token < 0) | (is_query & (bit == 1))
    else:
        seen = token <= tail.token[:, None]
    return seen


@jit
def with_device_scales(scaling, tensors, MODE):
    """The scaling, times the scales of an 8-bit cache that the device holds."""
    scale, value = scaling.scale, scaling.value
    if MODE.device_scales:
        scale *= tl.load(tensors.k_scale)
        value *= tl.load(tensors.v_scale)
    return Scaling(scale, scaling.cap, value)


@jit
def capped(products, scaling, SOFT_CAP):
    """Scores of products of queries and keys, and the factor that brings them to base 2."""
    if SOFT_CAP:
        # tanh through exp: saturates to +-1 without overflow in either direction.
        LOG2_E: tl.constexpr = 1.4426950408889634
        doubled = tl.exp2(products * (scaling.scale * 2.0 * LOG2_E / scaling.cap))
        products = (scaling.cap * LOG2_E) * (1.0 - 2.0 / (doubled + 1.0))
        factor = 1.0
    else:
        factor = scaling.scale
    return products, factor


@jit
def load_queries(tensors, strides, vectors, HEADS, UPCAST):
    """[M, D]: the query vectors of a tile; 0 outside the tile."""
    offs_d = tl.arange(0, HEADS.padded_dim)[None, :]
    q = tl.load(
        tensors.q
        + vectors.row.to(tl.int64)[:, None] * strides.q_batch
        + vectors.head[:, None] * strides.q_head
        + offs_d,
        mask=vectors.there[:, None] & (offs_d < HEADS.dim),
        other=0.0,
    )
    if UPCAST:
        q = q.to(tl.float32)
    return q


@jit
def kv_offsets(page, position, CACHE):
    """Offsets of tokens in the caches of K and V, in elements."""
    return page.to(tl.int64) * CACHE.page + position % CACHE.page_size * CACHE.token


@jit
def sink_weight(sinks, head, there, maximum):
    """The weight of each query vector's sink, among weights relative to `maximum`, in base 2.

    Without a token `maximum` is -inf: then any finite weight gives an output of 0.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    sink = tl.load(sinks + head, mask=there, other=0.0).to(tl.float32) * LOG2_E
    return tl.exp2(sink - tl.where(maximum == float("-inf"), 0.0, maximum))


@jit
def write_results(online, vectors, slot, tensors, strides, HEADS, MODE):
    """Write each query vector's output, or its partial result to its slot.

    `online.acc` is [M, D]. An empty range contributes nothing: O = 0, LSE = -inf. An output has
    its sink. A partial result has none: its merge adds the sink.
    """
    acc, maximum, total = online.acc, online.maximum, online.total
    offs_d = tl.arange(0, HEADS.padded_dim)[None, :]
    in_head = offs_d < HEADS.dim
    safe_total = tl.where(total > 0.0, total, 1.0)
    normal = 1.0 / safe_total
    direct = vectors.there & (slot < 0)
    partial = vectors.there & (slot >= 0)
    if tl.reduce(direct.to(tl.int32), 0, tl.standard._elementwise_max) > 0:
        whole = normal
        if MODE.sinks:
            weight = sink_weight(tensors.sinks, vectors.head, vectors.there, maximum)
            whole = 1.0 / (safe_total + weight)
        tl.store(
            tensors.out
            + vectors.row.to(tl.int64)[:, None] * strides.out_batch
            + vectors.head[:, None] * strides.out_head
            + offs_d,
            (acc * whole[:, None]).to(tensors.out.dtype.element_ty),
            mask=direct[:, None] & in_head,
        )
    if tl.reduce(partial.to(tl.int32), 0, tl.standard._elementwise_max) > 0:
        # A partial result is stored relative to its largest element: this keeps 11 bits of
        # mantissa, whatever the range of the cache's dtype.
        largest = tl.reduce(tl.abs(acc), 1, tl.standard._elementwise_max)
        largest = tl.maximum(largest, 1.0e-30)
        at = slot.to(tl.int64) * (HEADS.num_kv * HEADS.vectors) + vectors.result
        tl.store(
            tensors.partial.out + at[:, None] * HEADS.dim + offs_d,
            (acc * (1.0 / largest)[:, None]).to(tensors.partial.out.dtype.element_ty),
            mask=partial[:, None] & in_head,
        )
        lse = tl.where(total > 0.0, maximum + tl.log2(safe_total), float("-inf"))
        tl.store(tensors.partial.lse + at, lse, mask=partial)
        tl.store(tensors.partial.scale + at, largest * normal, mask=partial)


class Rest(NamedTuple):
    """The tokens of a masked tile that are left to the loop with masks, by segment: [S] numbers.

    Positions count through these tokens, from 0.
    """

    first_segment: Any
    offset: Any  # position of each segment's first token
    code: Any
    """The segment's number above SHIFT_BITS bits, which hold its shift: what to add to a position
    for the token's position in its request. Codes grow with the segment's number."""
    tokens: Any  # how many they are in all segments: a scalar


SHIFT_BITS = tl.constexpr(26)  # bits of a code that hold a segment's shift


@jit
def rest_of(item, done, tensors, plan, TILE):
    """The tokens of an item behind the first `done` tokens of its first segment."""
    SHIFT: tl.constexpr = SHIFT_BITS.value
    offs_s = tl.arange(0, TILE.block_segments)
    present = offs_s < item.segments
    segment = item.first_segment + offs_s
    request = tl.load(plan.segment_request + segment, mask=present, other=0)
    start = tl.load(plan.segment_start + segment, mask=present, other=0)
    stop = tl.load(plan.segment_end + segment, mask=present, other=0)
    length = tl.load(tensors.seq_lens + request, mask=present & (stop < 0), other=0)
    stop = tl.where(stop < 0, length.to(tl.int32), stop)
    start += tl.where(offs_s == 0, done, 0)
    tokens = tl.maximum(stop - start, 0)
    offset = tl.associative_scan(tokens, 0, tl.standard._sum_combine)
    remaining = tl.reduce(tokens, 0, tl.standard._sum_combine)
    offset -= tokens
    code = (offs_s << SHIFT) + (start - offset + (1 << (SHIFT - 1)))
    offset = tl.where(present, offset, remaining)
    return Rest(item.first_segment, offset, code, remaining)


@jit
def locate(position, rest, tensors, plan, strides, CACHE):
    """Page, position in the request, and span of [N] positions among an item's remaining tokens.

    The segment of a position is the last one that has started: the maximum of their codes.
    """
    SHIFT: tl.constexpr = SHIFT_BITS.value
    inside = position < rest.tokens
    started = position[:, None] >= rest.offset[None, :]
    code = tl.reduce(tl.where(started, rest.code[None, :], 0), 1, tl.standard._elementwise_max)
    token = position + (code & ((1 << SHIFT) - 1)) - (1 << (SHIFT - 1))
    segment = rest.first_segment + (code >> SHIFT)
    span = tl.load(plan.segment_span + segment, mask=inside, other=0)
    table_row = tl.load(tensors.table_rows + segment, mask=inside, other=0)
    entry = tensors.page_table + table_row.to(tl.int64) * strides.table + token // CACHE.page_size
    page = tl.load(entry, mask=inside, other=0)
    return page, token, span
