"""Requests of several query tokens, in the kernels in Gluon: where they lie, and what they see.

A request's last tokens are its query tokens. All query vectors see the tokens before these. A query
token of a chain also sees itself and the query tokens before it. A query token of a tree sees its
ancestors among the query tokens, by the bits in `ancestors` (DeFT, Remark 3.1).

Only leaves hold query tokens, and an item of a leaf has one query block. So a few numbers of the
item tell what its query vectors see.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from deft_backend.kernels.hopper.versions import gl, jit


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
def places_of(query, vector, there, kv_head, tensors, HEADS: gl.constexpr):
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
def tail_of(item, tensors, plan, HEADS: gl.constexpr):
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
def _seen_bits(first, query_token, tail, tensors, strides, HEADS: gl.constexpr):
    """[M] uint64: bit ``i`` is set if query tokens [M] see query token ``first + i``.

    Tokens before the query tokens have negative numbers, from -63 on; all query tokens see them.
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
def sees(
    first, index, query_token, tail, tensors, strides, AXIS: gl.constexpr, HEADS: gl.constexpr,
):  # fmt: skip
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
