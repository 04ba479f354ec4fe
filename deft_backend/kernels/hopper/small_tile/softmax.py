"""The online softmax of small tiles, transposed: tokens on the tensor cores' rows (Gluon)."""

from __future__ import annotations

from typing import Any, NamedTuple

from deft_backend.kernels.hopper.eight_bits import keys_of, values_of
from deft_backend.kernels.hopper.parts import capped, larger, plus
from deft_backend.kernels.hopper.query_tokens import sees
from deft_backend.kernels.hopper.versions import gl, jit, mma_v2


class Online(NamedTuple):
    """The softmax of an item's tokens so far, for M query vectors."""

    maximum: Any  # [M]: each query vector's largest score, in base 2
    total: Any  # [8, M]: sums of weights. Eight threads share a row, and each has a sum.
    acc: Any  # [D, M]: sums of values, weighted by ``2^(score - maximum)``


@jit
def no_tokens(HEADS: gl.constexpr, TILE: gl.constexpr, LAYOUT: gl.constexpr):
    """The softmax before an item's first token."""
    BLOCK_M: gl.constexpr = TILE.height
    BLOCK_N: gl.constexpr = TILE.block_tokens
    HEAD_DIM: gl.constexpr = HEADS.dim
    # A product's rows are those of eight threads in turn.
    THREADS: gl.constexpr = gl.reshape(
        gl.zeros([BLOCK_N, BLOCK_M], gl.float32, LAYOUT.product), [BLOCK_N // 8, 8, BLOCK_M]
    ).type.layout
    return Online(
        gl.full([BLOCK_M], float("-inf"), gl.float32, LAYOUT.column),
        gl.zeros([8, BLOCK_M], gl.float32, gl.SliceLayout(0, THREADS)),
        gl.zeros([HEAD_DIM, BLOCK_M], gl.float32, LAYOUT.product),
    )


@jit
def add_block(
    online, q, k, v, left, tail, tensors, scaling, strides, HEADS: gl.constexpr,
    CACHE: gl.constexpr, TILE: gl.constexpr, MODE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """The softmax with one more block of tokens, of which the first `left` are the item's.

    `q` [M, D], `k` and `v` [tokens, D] are in shared memory.
    """
    DTYPE: gl.constexpr = tensors.q.dtype.element_ty
    EXPONENT_BITS: gl.constexpr = CACHE.exponent_bits
    BLOCK_M: gl.constexpr = TILE.height
    BLOCK_N: gl.constexpr = TILE.block_tokens
    factor = scaling.scale
    if MODE.soft_cap:
        factor = 1.0
    token = gl.arange(0, BLOCK_N, layout=LAYOUT.token)
    no_scores = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, LAYOUT.product)
    keys = keys_of(k, DTYPE, EXPONENT_BITS, LAYOUT)
    scores = mma_v2(keys, q.permute((1, 0)).load(LAYOUT.queries), no_scores)
    scores = capped(scores, scaling, MODE.soft_cap)
    scores = gl.where((token < left)[:, None], scores, float("-inf"))
    if not HEADS.single:
        if left - BLOCK_N < tail.hidden:  # some of these are query tokens
            row = gl.arange(0, BLOCK_M, layout=LAYOUT.column)
            query_token = tail.first + row % HEADS.vectors // HEADS.group
            first = tail.hidden - left
            seen = sees(first, token, query_token, tail, tensors, strides, 0, HEADS)
            scores = gl.where(seen, scores, float("-inf"))
    maximum = gl.maximum(online.maximum, gl.reduce(scores, 0, larger) * factor)
    # An empty range keeps its maximum at -inf: avoid -inf - -inf.
    reference = gl.where(maximum == float("-inf"), 0.0, maximum)
    weights = gl.exp2(scores * factor - reference[None, :])
    rescale = gl.exp2(online.maximum - reference)
    added = gl.reduce(gl.reshape(weights, [BLOCK_N // 8, 8, BLOCK_M]), 0, plus)
    by_thread = gl.convert_layout(rescale, gl.SliceLayout(0, online.total.type.layout))
    total = online.total * by_thread[None, :] + added
    values = values_of(v, DTYPE, EXPONENT_BITS, LAYOUT)
    weights = gl.convert_layout(weights.to(DTYPE), LAYOUT.right)
    acc = mma_v2(values, weights, online.acc * rescale[None, :])
    return Online(maximum, total, acc)
