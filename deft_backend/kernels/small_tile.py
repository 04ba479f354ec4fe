"""Stage 1 for the small tile: partial attention of few queries over one KV range.

    S = Q K^T * sm_scale,   LSE = log2 sum_n 2^(S_n * log2 e),   O = softmax(S) V

(FlashForge's PAC, Algorithm 2.) This kernel has the items, arguments and results of
`partial_attention`. A small tile reuses little KV, so the kernel keeps many loads in flight:

- A program is one warp. It meets no barrier, and an SM holds many.
- The tensor cores compute S^T = K Q^T and O^T = V^T P^T: a tile of eight columns wastes little on a
  GQA group of four heads and holds half the registers.
- An item is a chain of loads: the item, its row of the page table, page ids, keys and values. Each
  load gives the addresses of the next. A program starts the first of them for its next two items
  while it works on one, and waits for the last only.

An item may **merge** the partial results that earlier launches left for its query. It then writes
the query's output, and stage 2 has nothing to do for that query.
"""

from __future__ import annotations

import triton.language as tl
from triton import jit
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deft_backend.planner import encoding_constants


@jit
def _attend(
    q, k, v, acc, maximum, total, inside, scale, logit_cap,
    SOFT_CAP: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One block of the online softmax: k is [N, D], v [D, N], acc [D, M]; never empty."""
    if UPCAST:  # what a tensor core does with the operands; the interpreter cannot
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    scores = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    if SOFT_CAP:
        # tanh through exp: saturates to +-1 without overflow in either direction. `scale` is
        # sm_scale here, without the change of base.
        LOG2_E: tl.constexpr = 1.4426950408889634
        doubled = tl.exp2(scores * (scale * 2.0 * LOG2_E / logit_cap))
        scores = (logit_cap * LOG2_E) * (1.0 - 2.0 / (doubled + 1.0))
        factor = 1.0
    else:
        factor = scale
    scores = tl.where(inside[:, None], scores, float("-inf"))
    highest = tl.reduce(scores, 0, tl.standard._elementwise_max) * factor
    new_maximum = tl.maximum(maximum, highest)
    weights = tl.exp2(scores * factor - new_maximum[None, :])
    rescale = tl.exp2(maximum - new_maximum)
    total = total * rescale + tl.reduce(weights, 0, tl.standard._sum_combine)
    acc = acc * rescale[None, :]
    acc = tl.dot(v, weights.to(v.dtype), acc, input_precision=PRECISION)
    return acc, new_maximum, total


@jit
def _read_item(
    work, work_end, item_query_ptr, segment_row_ptr, segment_start_ptr, segment_end_ptr,
    NUM_KV_HEADS: tl.constexpr,
):  # fmt: skip
    """First link of the chain: entries, row, start and end. Of no item: those of an empty one."""
    item = work // NUM_KV_HEADS  # item and segment are one: see TILE_SEGMENTS
    there = work < work_end
    entry = tl.load(item_query_ptr + item, mask=there, other=0)
    entry_end = tl.load(item_query_ptr + item + 1, mask=there, other=0)
    row = tl.load(segment_row_ptr + item, mask=there, other=0)
    start = tl.load(segment_start_ptr + item, mask=there, other=0)
    stop = tl.load(segment_end_ptr + item, mask=there, other=0)
    return entry, entry_end, row, start, stop


@jit
def _read_row(
    work, work_end, row, seq_lens_ptr, table_rows_ptr, NUM_KV_HEADS: tl.constexpr,
    TABLE_BY_SEGMENT: tl.constexpr,
):  # fmt: skip
    """Second link: tokens of the row's sequence, and its row of the page table."""
    length = tl.load(seq_lens_ptr + row).to(tl.int32)
    listed = work // NUM_KV_HEADS if TABLE_BY_SEGMENT else row
    table = tl.load(table_rows_ptr + listed, mask=work < work_end, other=0)
    return length, table.to(tl.int64)


@jit
def small_tile_attention(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    partial_scale_ptr,
    page_table_ptr,
    table_rows_ptr,
    seq_lens_ptr,
    tile_ptr,
    item_segment_ptr,
    item_query_ptr,
    segment_row_ptr,
    segment_start_ptr,
    segment_end_ptr,
    segment_span_ptr,
    entry_query_ptr,
    entry_slot_ptr,
    scale,
    logit_cap,
    stride_q_batch,
    stride_q_head,
    stride_out_batch,
    stride_out_head,
    stride_table,
    STRIDE_K_PAGE: tl.constexpr,
    STRIDE_K_TOKEN: tl.constexpr,
    STRIDE_K_HEAD: tl.constexpr,
    STRIDE_V_PAGE: tl.constexpr,
    STRIDE_V_TOKEN: tl.constexpr,
    STRIDE_V_HEAD: tl.constexpr,
    PLACE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GQA_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    TABLE_BY_SEGMENT: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GQA_GROUP
    MERGES: tl.constexpr = encoding_constants.MERGES.value
    if OVERLAPPED:
        gdc_launch_dependents()

    work_end = tl.load(tile_ptr + PLACE + 1) * NUM_KV_HEADS
    first_work = tl.load(tile_ptr + PLACE) * NUM_KV_HEADS + tl.program_id(0)
    step = tl.num_programs(0)

    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    in_head = offs_d < HEAD_DIM
    query_of_row = offs_m // GQA_GROUP
    head_of_row = offs_m % GQA_GROUP

    entry, entry_end, row, start, stop = _read_item(
        first_work, work_end, item_query_ptr, segment_row_ptr, segment_start_ptr,
        segment_end_ptr, NUM_KV_HEADS,
    )  # fmt: skip
    next_entry, next_entry_end, next_row, next_start, next_stop = _read_item(
        first_work + step, work_end, item_query_ptr, segment_row_ptr, segment_start_ptr,
        segment_end_ptr, NUM_KV_HEADS,
    )  # fmt: skip
    row_length, table_row = _read_row(
        first_work, work_end, row, seq_lens_ptr, table_rows_ptr, NUM_KV_HEADS, TABLE_BY_SEGMENT
    )

    for work in range(first_work, work_end, step):
        # KV heads of one item are neighbours: they read the same page-table entries.
        kv_head = work % NUM_KV_HEADS
        head = kv_head * GQA_GROUP + head_of_row
        in_tile = query_of_row < entry_end - entry
        table = page_table_ptr + table_row * stride_table
        # An open range ends where its row's sequence ends now.
        length = tl.maximum(tl.where(stop < 0, row_length, stop) - start, 0)
        page = tl.load(table + (start + offs_n) // PAGE_SIZE, mask=offs_n < length, other=0)
        query = tl.load(entry_query_ptr + entry + query_of_row, mask=in_tile, other=0)

        # The next items' links, whose addresses are here since the item before.
        next_row_length, next_table_row = _read_row(
            work + step, work_end, next_row, seq_lens_ptr, table_rows_ptr, NUM_KV_HEADS,
            TABLE_BY_SEGMENT,
        )  # fmt: skip
        later_entry, later_entry_end, later_row, later_start, later_stop = _read_item(
            work + 2 * step, work_end, item_query_ptr, segment_row_ptr, segment_start_ptr,
            segment_end_ptr, NUM_KV_HEADS,
        )  # fmt: skip

        q = tl.load(
            q_ptr
            + query.to(tl.int64)[:, None] * stride_q_batch
            + head[:, None] * stride_q_head
            + offs_d,
            mask=in_tile[:, None] & in_head,
            other=0.0,
        )
        if UPCAST:
            q = q.to(tl.float32)
        maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.full([BLOCK_M], 0.0, tl.float32)
        acc = tl.full([HEAD_DIM_PADDED, BLOCK_M], 0.0, tl.float32)
        k_head = k_ptr + kv_head.to(tl.int64) * STRIDE_K_HEAD
        v_head = v_ptr + kv_head.to(tl.int64) * STRIDE_V_HEAD
        for begin in range(0, length, BLOCK_N):
            inside = offs_n < length - begin
            in_page = (start + begin + offs_n) % PAGE_SIZE
            k_offset = page.to(tl.int64) * STRIDE_K_PAGE + in_page * STRIDE_K_TOKEN
            v_offset = page.to(tl.int64) * STRIDE_V_PAGE + in_page * STRIDE_V_TOKEN
            k = tl.load(
                k_head + k_offset[:, None] + offs_d, mask=inside[:, None] & in_head, other=0.0
            )
            v = tl.load(
                v_head + v_offset[None, :] + tl.trans(offs_d),
                mask=inside[None, :] & tl.trans(in_head),
                other=0.0,
            )
            ahead = begin + BLOCK_N + offs_n
            page = tl.load(table + (start + ahead) // PAGE_SIZE, mask=ahead < length, other=0)
            acc, maximum, total = _attend(
                q, k, v, acc, maximum, total, inside, scale, logit_cap,
                SOFT_CAP, PRECISION, UPCAST,
            )  # fmt: skip
        result = tl.trans(acc)

        # Read again rather than held in registers through the loop.
        query = tl.load(entry_query_ptr + entry + query_of_row, mask=in_tile, other=0)
        slot = tl.load(entry_slot_ptr + entry + query_of_row, mask=in_tile, other=0)
        merged = tl.load(segment_span_ptr + work // NUM_KV_HEADS)
        if merged > 0:
            if OVERLAPPED:
                gdc_wait()
            first_slot = MERGES - slot.to(tl.int64)
            for part in range(0, merged):
                at = (first_slot + part) * NUM_HEADS + head
                part_lse = tl.load(partial_lse_ptr + at, mask=in_tile, other=float("-inf"))
                part_scale = tl.load(partial_scale_ptr + at, mask=in_tile, other=0.0)
                part_out = tl.load(
                    partial_out_ptr + at[:, None] * HEAD_DIM + offs_d,
                    mask=in_tile[:, None] & in_head,
                    other=0.0,
                )
                new_maximum = tl.maximum(maximum, part_lse)
                # Empty ranges have LSE = -inf and weigh nothing: avoid -inf - -inf.
                reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
                rescale = tl.exp2(maximum - reference)
                weight = tl.exp2(part_lse - reference)
                total = total * rescale + weight
                result = result * rescale[:, None]
                result += part_out.to(tl.float32) * (weight * part_scale)[:, None]
                maximum = new_maximum

        # An empty range contributes nothing: O = 0, LSE = -inf.
        safe_total = tl.where(total > 0.0, total, 1.0)
        normal = 1.0 / safe_total
        direct = in_tile & (slot < 0)
        partial = in_tile & (slot >= 0)
        if tl.reduce(direct.to(tl.int32), 0, tl.standard._elementwise_max) > 0:
            tl.store(
                out_ptr
                + query.to(tl.int64)[:, None] * stride_out_batch
                + head[:, None] * stride_out_head
                + offs_d,
                (result * normal[:, None]).to(out_ptr.dtype.element_ty),
                mask=direct[:, None] & in_head,
            )
        if tl.reduce(partial.to(tl.int32), 0, tl.standard._elementwise_max) > 0:
            # Partial results keep 11 bits of mantissa relative to their row's largest element,
            # whatever the range of the cache's dtype.
            largest = tl.reduce(tl.abs(result), 1, tl.standard._elementwise_max)
            largest = tl.maximum(largest, 1.0e-30)
            where = slot.to(tl.int64) * NUM_HEADS + head
            tl.store(
                partial_out_ptr + where[:, None] * HEAD_DIM + offs_d,
                (result * (1.0 / largest)[:, None]).to(partial_out_ptr.dtype.element_ty),
                mask=partial[:, None] & in_head,
            )
            lse = tl.where(total > 0.0, maximum + tl.log2(safe_total), float("-inf"))
            tl.store(partial_lse_ptr + where, lse, mask=partial)
            tl.store(partial_scale_ptr + where, largest * normal, mask=partial)

        row_length, table_row = next_row_length, next_table_row
        entry, entry_end, row, start, stop = (
            next_entry, next_entry_end, next_row, next_start, next_stop,
        )  # fmt: skip
        next_entry, next_entry_end, next_row, next_start, next_stop = (
            later_entry, later_entry_end, later_row, later_start, later_stop,
        )  # fmt: skip

    if OVERLAPPED:
        gdc_wait()
