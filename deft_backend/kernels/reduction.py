"""Stage 2: merge a query's partial results by their log-sum-exp (FlashForge's POR, Algorithm 3).

    O = sum_i O_i 2^LSE_i / (sum_i 2^LSE_i + 2^sink)          (DeFT, equation 1, in base 2)

A query's partial results lie in neighbouring slots. The kernel merges them in the order of the
plan's items, so every run gives the same bits. Queries whose attention is one item are absent.
The sink of a head, if it has one, joins the sum of weights here: no partial result contains it.
"""

from __future__ import annotations

import triton.language as tl
from triton import jit
from triton.language.extra.cuda import gdc_wait

from deft_backend.kernels.arguments import Partials
from deft_backend.kernels.plain.parts import block_of, rows_of, sink_weight
from deft_backend.planner import encoding
from deft_backend.planner.device_plan import ReduceArrays


@jit
def reduce_partials(
    partial: Partials,
    out_ptr,
    sinks,
    plan: ReduceArrays,
    query_start_ptr,
    stride_out_batch,
    stride_out_head,
    HEADS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_H: tl.constexpr,
    OVERLAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    SPREAD: tl.constexpr,
):
    """`query_start_ptr` is read only where `HEADS.ragged`, `sinks` only where SINKS.

    With SPREAD, the counters of programs become 0 again, for the next attention over this plan.
    """
    COUNTERS: tl.constexpr = encoding.ARRIVALS
    NUM_HEADS: tl.constexpr = HEADS.num_kv * HEADS.vectors  # of all tokens of a query block
    HEAD_DIM: tl.constexpr = HEADS.dim
    HEAD_DIM_PADDED: tl.constexpr = HEADS.padded_dim
    HEAD_BLOCKS: tl.constexpr = (NUM_HEADS + BLOCK_H - 1) // BLOCK_H
    offs_p = tl.arange(0, BLOCK_P)[:, None]
    offs_h = tl.arange(0, BLOCK_H)[None, :]
    offs_d = tl.arange(0, HEAD_DIM_PADDED)[None, None, :]
    work_end = tl.load(plan.num_reduce) * HEAD_BLOCKS
    # Read the first query's numbers while stage 1 ends. Later rounds read their own: Triton 3.6
    # loses numbers that a loop carries to its next round.
    first_query = tl.program_id(0) // HEAD_BLOCKS
    there = tl.program_id(0) < work_end
    first_of = tl.load(plan.reduce_query + first_query, mask=there, other=0)
    first_begin = tl.load(plan.reduce_ptr + first_query, mask=there, other=0)
    first_end = tl.load(plan.reduce_ptr + first_query + 1, mask=there, other=0)
    # One program at least must wait, or this launch could end before the launches ahead of it.
    # Other programs that have nothing to merge end at once.
    if OVERLAPPED:
        if there | (tl.program_id(0) == 0):
            gdc_wait()
    if SPREAD:
        if tl.program_id(0) == 0:
            tl.store(plan.arrivals + tl.arange(0, COUNTERS), 0)

    for work in range(tl.program_id(0), work_end, tl.num_programs(0)):
        which = work // HEAD_BLOCKS
        head = work % HEAD_BLOCKS * BLOCK_H + offs_h
        in_heads = head < NUM_HEADS
        later = work != tl.program_id(0)
        query = tl.load(plan.reduce_query + which, mask=later, other=0)
        begin = tl.load(plan.reduce_ptr + which, mask=later, other=0)
        end = tl.load(plan.reduce_ptr + which + 1, mask=later, other=0)
        query = tl.where(later, query, first_of).to(tl.int64)
        begin = tl.where(later, begin, first_begin)
        end = tl.where(later, end, first_end)

        maximum = tl.full([BLOCK_H], float("-inf"), tl.float32)
        total = tl.full([BLOCK_H], 0.0, tl.float32)
        acc = tl.full([BLOCK_H, HEAD_DIM_PADDED], 0.0, tl.float32)
        for first in range(begin, end, BLOCK_P):
            slot = first + offs_p
            present = (slot < end) & in_heads
            where = slot.to(tl.int64) * NUM_HEADS + head
            lse = tl.load(partial.lse + where, mask=present, other=float("-inf"))
            scale = tl.load(partial.scale + where, mask=present, other=0.0)
            o = tl.load(
                partial.out + where[:, :, None] * HEAD_DIM + offs_d,
                mask=present[:, :, None] & (offs_d < HEAD_DIM),
                other=0.0,
            ).to(tl.float32)
            new_maximum = tl.maximum(maximum, tl.reduce(lse, 0, tl.standard._elementwise_max))
            # Partial results of empty ranges have LSE = -inf and weigh nothing: no -inf - -inf.
            reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            weights = tl.exp2(lse - reference[None, :])
            rescale = tl.exp2(maximum - reference)
            total = total * rescale + tl.reduce(weights, 0, tl.standard._sum_combine)
            scaled = (weights * scale)[:, :, None] * o
            acc = acc * rescale[:, None] + tl.reduce(scaled, 0, tl.standard._sum_combine)
            maximum = new_maximum

        if SINKS:
            result_of = work % HEAD_BLOCKS * BLOCK_H + tl.arange(0, BLOCK_H)
            sink_of = result_of % (HEADS.num_kv * HEADS.group)
            total += sink_weight(sinks, sink_of, result_of < NUM_HEADS, maximum)
        result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
        head_of_row = tl.trans(head)
        offs_row = tl.arange(0, HEAD_DIM_PADDED)[None, :]
        is_head = head_of_row < NUM_HEADS
        row = query
        if not HEADS.single:
            request, token = block_of(query, HEADS)
            token += head_of_row // (HEADS.num_kv * HEADS.group)
            head_of_row = head_of_row % (HEADS.num_kv * HEADS.group)
            first, tokens = rows_of(request, True, query_start_ptr, HEADS)
            row = first + token
            is_head &= token < tokens
        tl.store(
            out_ptr + row * stride_out_batch + head_of_row * stride_out_head + offs_row,
            result.to(out_ptr.dtype.element_ty),
            mask=is_head & (offs_row < HEAD_DIM),
        )
