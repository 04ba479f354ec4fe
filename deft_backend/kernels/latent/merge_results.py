"""Stage 2 of MLA: merge each request's partial results by their log-sum-exp.

O = sum_i O_i exp(LSE_i) / sum_i exp(LSE_i)                     (DeFT, equation 1)
"""

from __future__ import annotations

import triton.language as tl
from triton import jit

from deft_backend.kernels.latent.lay_out import Merges


@jit
def _weighed(maximum, total, acc, out_ptr, lse_ptr, row, rows, head, HEADS, VALUE_DIM):
    """Take one more partial result into the sums."""
    value = tl.arange(0, VALUE_DIM)[None, :]
    inside = head < HEADS
    lse = tl.load(lse_ptr + head * rows + row, mask=inside, other=float("-inf"))
    # Kernels give an empty range either infinity.
    lse = tl.where(lse == float("inf"), float("-inf"), lse)
    at = (row * HEADS + head[:, None]) * VALUE_DIM + value
    part = tl.load(out_ptr + at, mask=inside[:, None], other=0.0).to(tl.float32)
    higher = tl.maximum(maximum, lse)
    reference = tl.where(higher == float("-inf"), 0.0, higher)
    rescale = tl.exp(maximum - reference)
    weight = tl.exp(lse - reference)
    # What a kernel writes for an empty range is anybody's guess.
    part = tl.where((weight > 0.0)[:, None], part, 0.0)
    return higher, total * rescale + weight, acc * rescale[:, None] + part * weight[:, None]


@jit(do_not_specialize=["rows", "leaf_rows", "out_row", "out_head"])
def merge_results(
    part_out_ptr,
    part_lse_ptr,
    leaf_out_ptr,
    leaf_lse_ptr,
    out_ptr,
    merges: Merges,
    rows,
    leaf_rows,
    out_row,
    out_head,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    APART: tl.constexpr,
):
    """Each program merges BLOCK_H heads of one query token.

    The parts lie in `rows` rows: outputs [rows, HEADS, VALUE_DIM], log-sum-exps [HEADS, rows].
    With APART, the results of leaves are in `leaf_rows` rows of their own, in the order of the
    query tokens.
    """
    at = tl.program_id(0).to(tl.int64)
    request = tl.program_id(0) // TOKENS
    token = tl.program_id(0) % TOKENS
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    first = tl.load(merges.first + request)
    parts = tl.load(merges.parts + request)
    maximum = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total = tl.full([BLOCK_H], 0.0, tl.float32)
    acc = tl.full([BLOCK_H, VALUE_DIM], 0.0, tl.float32)
    if APART:
        if parts > 0:
            maximum, total, acc = _weighed(
                maximum, total, acc, leaf_out_ptr, leaf_lse_ptr, at, leaf_rows, head, HEADS,
                VALUE_DIM,
            )  # fmt: skip
    for place in range(first, first + parts):
        row = tl.load(merges.entry + place).to(tl.int64) * TOKENS + token
        maximum, total, acc = _weighed(
            maximum, total, acc, part_out_ptr, part_lse_ptr, row, rows, head, HEADS, VALUE_DIM
        )
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    value = tl.arange(0, VALUE_DIM)[None, :]
    to = at * out_row + head[:, None] * out_head + value
    tl.store(out_ptr + to, result.to(out_ptr.dtype.element_ty), mask=(head < HEADS)[:, None])
