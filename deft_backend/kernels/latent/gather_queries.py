"""Copy the query vectors of each entry of the plan to the entry's place, for one layer."""

from __future__ import annotations

import triton.language as tl
from triton import jit

from deft_backend.kernels.latent.lay_out import Merges


@jit(do_not_specialize=["nope_row", "nope_head", "rope_row", "rope_head"])
def gather_queries(
    q_nope_ptr,
    q_rope_ptr,
    nope_ptr,
    rope_ptr,
    merges: Merges,
    nope_row,
    nope_head,
    rope_row,
    rope_head,
    HEADS: tl.constexpr,
    TOKENS: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Each program copies BLOCK_H heads of one query token; `nope` and `rope` are contiguous."""
    entry = tl.program_id(0) // TOKENS
    if entry >= tl.load(merges.count):
        return
    request = tl.load(merges.source + entry)
    row = (request * TOKENS + tl.program_id(0) % TOKENS).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    to = tl.program_id(0).to(tl.int64) * HEADS + head
    value = tl.arange(0, VALUE_DIM)[None, :]
    nope = tl.load(
        q_nope_ptr + row * nope_row + head * nope_head + value, mask=head < HEADS, other=0.0
    )
    tl.store(nope_ptr + to * VALUE_DIM + value, nope, mask=head < HEADS)
    dim = tl.arange(0, ROPE_DIM)[None, :]
    rope = tl.load(
        q_rope_ptr + row * rope_row + head * rope_head + dim, mask=head < HEADS, other=0.0
    )
    tl.store(rope_ptr + to * ROPE_DIM + dim, rope, mask=head < HEADS)
