"""Stage 1 for large and masked tiles: partial attention (FlashForge's PAC, Algorithm 2).

For an item with queries Q and KV ranges K, V the kernel computes

    S   = Q K^T * sm_scale            (soft-capped: cap * tanh(S / cap))
    LSE = log2 sum_n 2^(S_n * log2 e)
    O   = softmax(S) V

with an online softmax over KV blocks and float32 accumulation (DeFT, section 3.1). A block is
loaded once for every query of the tile and every query head of its GQA group: a query
vector of the tile is a (query, head of the GQA group) pair. `small_tile` runs the small tiles.

An item's KV is a list of segments. Every query of the tile attends to the only segment of a large
tile, and may attend to the first segment of a masked tile. The whole KV blocks of such a segment
run in a loop without masks, which takes most of the time of a shared prefix. A second loop runs its
last tokens and the other segments (DeFT's flattened nodes). It finds each token's segment and masks
the queries outside the segment's span. In forest order those queries are one run (DeFT's bit mask
is a run of ones), so two small integers hold the span.

Both loops hold the page ids of the block to be loaded next in registers: the KV loads, which the
compiler pipelines, then depend on no other load.

Programs are persistent: they read how many items there are from the device and take every
``num_programs``-th, so one kernel configuration serves every plan. Launches of
different tile shapes do not depend on one another and overlap: each lets the next one start at once
(programmatic dependent launch) and ends only after the one before it.
"""

from __future__ import annotations

import triton.language as tl
from triton import jit
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deft_backend.planner import encoding_constants


@jit
def _attend(
    q, k, v, acc, maximum, total, allowed, scale, logit_cap, MASKED: tl.constexpr,
    SOFT_CAP: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """One block of the online softmax; `scale` brings scores to base 2."""
    if UPCAST:  # what a tensor core does with the operands; the interpreter cannot
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if SOFT_CAP:
        # tanh through exp: saturates to +-1 without overflow in either direction. `scale` is
        # sm_scale here, without the change of base.
        LOG2_E: tl.constexpr = 1.4426950408889634
        doubled = tl.exp2(scores * (scale * 2.0 * LOG2_E / logit_cap))
        scores = (logit_cap * LOG2_E) * (1.0 - 2.0 / (doubled + 1.0))
        factor = 1.0
    else:
        factor = scale
    if MASKED:
        scores = tl.where(allowed, scores, float("-inf"))
    # A warpgroup's threads hold pairs of columns, eight apart: reduced in several short chains,
    # not in one that is as long as a thread's columns are many.
    M: tl.constexpr = scores.shape[0]
    CHAINS: tl.constexpr = scores.shape[1] // 16
    chains = tl.reshape(scores, [M, 2, CHAINS, 8])
    chains = tl.reshape(tl.reduce(chains, 2, tl.standard._elementwise_max), [M, 16])
    highest = tl.reduce(chains, 1, tl.standard._elementwise_max) * factor
    new_maximum = tl.maximum(maximum, highest)
    if MASKED:
        # A row that has seen no token yet keeps its maximum at -inf: avoid -inf - -inf.
        reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    else:
        reference = new_maximum
    weights = tl.exp2(scores * factor - reference[:, None])
    rescale = tl.exp2(maximum - reference)
    chains = tl.reshape(weights, [M, 2, CHAINS, 8])
    chains = tl.reshape(tl.reduce(chains, 2, tl.standard._sum_combine), [M, 16])
    total = total * rescale + tl.reduce(chains, 1, tl.standard._sum_combine)
    acc = acc * rescale[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, new_maximum, total


@jit
def _locate(
    position, total, offset, code, first_segment, segment_row_ptr, segment_span_ptr,
    table_rows_ptr, page_table_ptr, stride_table, PAGE_SIZE: tl.constexpr, SHIFT: tl.constexpr,
    TABLE_BY_SEGMENT: tl.constexpr,
):  # fmt: skip
    """Page, token in the page and query span of [N] positions of an item.

    Positions count through the item's segments. `code` grows with the segment, so that the segment
    of a position is a maximum: the segment's number above SHIFT bits of its shift.
    """
    inside = position < total
    started = position[:, None] >= offset[None, :]
    found = tl.reduce(tl.where(started, code[None, :], 0), 1, tl.standard._elementwise_max)
    token = position + (found & ((1 << SHIFT) - 1)) - (1 << (SHIFT - 1))
    segment = first_segment + (found >> SHIFT)
    span = tl.load(segment_span_ptr + segment, mask=inside, other=0)
    listed = segment
    if not TABLE_BY_SEGMENT:
        listed = tl.load(segment_row_ptr + segment, mask=inside, other=0)
    table_row = tl.load(table_rows_ptr + listed, mask=inside, other=0)
    entry = page_table_ptr + table_row.to(tl.int64) * stride_table + token // PAGE_SIZE
    page = tl.load(entry, mask=inside, other=0)
    return page, token % PAGE_SIZE, span


@jit
def partial_attention(
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
    BLOCK_S: tl.constexpr,
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
    # Bits that hold a segment's shift from positions in the item to positions in its row.
    SHIFT: tl.constexpr = 26
    SPAN_SHIFT: tl.constexpr = encoding_constants.SPAN_SHIFT.value
    SPAN_MASK: tl.constexpr = encoding_constants.SPAN_MASK.value
    if OVERLAPPED:
        gdc_launch_dependents()

    first_item = tl.load(tile_ptr + PLACE)
    work_end = tl.load(tile_ptr + PLACE + 1) * NUM_KV_HEADS

    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_s = tl.arange(0, BLOCK_S)
    offs_d = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    in_head = offs_d < HEAD_DIM
    query_of_row = offs_m // GQA_GROUP
    head_of_row = offs_m % GQA_GROUP

    for work in range(first_item * NUM_KV_HEADS + tl.program_id(0), work_end, tl.num_programs(0)):
        # KV heads of one item are neighbours: they read the same page-table entries.
        item = work // NUM_KV_HEADS
        kv_head = work % NUM_KV_HEADS
        if BLOCK_S > 1:
            first_segment = tl.load(item_segment_ptr + item)
            num_segments = tl.load(item_segment_ptr + item + 1) - first_segment
        else:  # every item of this shape, and of the shapes before it, has one
            first_segment = item
            num_segments = 1
        entry = tl.load(item_query_ptr + item)
        num_queries = tl.load(item_query_ptr + item + 1) - entry
        in_tile = query_of_row < num_queries
        query = tl.load(entry_query_ptr + entry + query_of_row, mask=in_tile, other=0)
        head = kv_head * GQA_GROUP + head_of_row

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
        acc = tl.full([BLOCK_M, HEAD_DIM_PADDED], 0.0, tl.float32)
        k_head = k_ptr + kv_head.to(tl.int64) * STRIDE_K_HEAD
        v_head = v_ptr + kv_head.to(tl.int64) * STRIDE_V_HEAD

        # The item's first segment, if every query attends to it.
        row = tl.load(segment_row_ptr + first_segment)
        start = tl.load(segment_start_ptr + first_segment)
        stop = tl.load(segment_end_ptr + first_segment)
        if stop < 0:  # open: it ends where its row's sequence ends now
            stop = tl.load(seq_lens_ptr + row).to(tl.int32)
        listed = first_segment if TABLE_BY_SEGMENT else row
        table = page_table_ptr + tl.load(table_rows_ptr + listed).to(tl.int64) * stride_table
        length = tl.maximum(stop - start, 0)
        if BLOCK_S > 1:
            if tl.load(segment_span_ptr + first_segment) != num_queries << SPAN_SHIFT:
                length = 0
        done = length // BLOCK_N * BLOCK_N
        ahead = start + offs_n
        page = tl.load(table + ahead // PAGE_SIZE, mask=offs_n < length, other=0)
        for begin in range(0, done, BLOCK_N):
            in_page = (start + begin + offs_n) % PAGE_SIZE
            k_offset = page.to(tl.int64) * STRIDE_K_PAGE + in_page * STRIDE_K_TOKEN
            v_offset = page.to(tl.int64) * STRIDE_V_PAGE + in_page * STRIDE_V_TOKEN
            k = tl.load(k_head + k_offset[:, None] + offs_d, mask=in_head, other=0.0)
            v = tl.load(v_head + v_offset[:, None] + offs_d, mask=in_head, other=0.0)
            ahead = begin + BLOCK_N + offs_n
            page = tl.load(table + (start + ahead) // PAGE_SIZE, mask=ahead < length, other=0)
            acc, maximum, total = _attend(
                q, k, v, acc, maximum, total, True, scale, logit_cap,
                False, SOFT_CAP, PRECISION, UPCAST,
            )  # fmt: skip
        if done < length:  # its last tokens; `page` holds their pages
            inside = offs_n < length - done
            in_page = (start + done + offs_n) % PAGE_SIZE
            k_offset = page.to(tl.int64) * STRIDE_K_PAGE + in_page * STRIDE_K_TOKEN
            v_offset = page.to(tl.int64) * STRIDE_V_PAGE + in_page * STRIDE_V_TOKEN
            present = inside[:, None] & in_head
            k = tl.load(k_head + k_offset[:, None] + offs_d, mask=present, other=0.0)
            v = tl.load(v_head + v_offset[:, None] + offs_d, mask=present, other=0.0)
            acc, maximum, total = _attend(
                q, k, v, acc, maximum, total, inside[None, :], scale, logit_cap,
                True, SOFT_CAP, PRECISION, UPCAST,
            )  # fmt: skip

        if BLOCK_S > 1:
            present = offs_s < num_segments
            segment = first_segment + offs_s
            row_of = tl.load(segment_row_ptr + segment, mask=present, other=0)
            start_of = tl.load(segment_start_ptr + segment, mask=present, other=0)
            stop_of = tl.load(segment_end_ptr + segment, mask=present, other=0)
            length_of = tl.load(seq_lens_ptr + row_of, mask=present & (stop_of < 0), other=0)
            stop_of = tl.where(stop_of < 0, length_of.to(tl.int32), stop_of)
            start_of += tl.where(offs_s == 0, length, 0)
            tokens = tl.maximum(stop_of - start_of, 0)
            offset = tl.associative_scan(tokens, 0, tl.standard._sum_combine)
            remaining = tl.reduce(tokens, 0, tl.standard._sum_combine)
            offset -= tokens
            code = (offs_s << SHIFT) + (start_of - offset + (1 << (SHIFT - 1)))
            offset = tl.where(present, offset, remaining)

            page, in_page, span = _locate(
                offs_n, remaining, offset, code, first_segment, segment_row_ptr, segment_span_ptr,
                table_rows_ptr, page_table_ptr, stride_table, PAGE_SIZE, SHIFT, TABLE_BY_SEGMENT,
            )  # fmt: skip
            for begin in range(0, remaining, BLOCK_N):
                inside = begin + offs_n < remaining
                k_offset = page.to(tl.int64) * STRIDE_K_PAGE + in_page * STRIDE_K_TOKEN
                v_offset = page.to(tl.int64) * STRIDE_V_PAGE + in_page * STRIDE_V_TOKEN
                load_mask = inside[:, None] & in_head
                k = tl.load(k_head + k_offset[:, None] + offs_d, mask=load_mask, other=0.0)
                v = tl.load(v_head + v_offset[:, None] + offs_d, mask=load_mask, other=0.0)
                # Tokens outside the item have span 0: no row attends to them.
                allowed = (query_of_row[:, None] >= (span & SPAN_MASK)[None, :]) & (
                    query_of_row[:, None] < (span >> SPAN_SHIFT)[None, :]
                )
                page, in_page, span = _locate(
                    begin + BLOCK_N + offs_n, remaining, offset, code, first_segment,
                    segment_row_ptr, segment_span_ptr, table_rows_ptr, page_table_ptr,
                    stride_table, PAGE_SIZE, SHIFT, TABLE_BY_SEGMENT,
                )  # fmt: skip
                acc, maximum, total = _attend(
                    q, k, v, acc, maximum, total, allowed, scale, logit_cap,
                    True, SOFT_CAP, PRECISION, UPCAST,
                )  # fmt: skip

        # Read again rather than held in registers through the loops.
        query = tl.load(entry_query_ptr + entry + query_of_row, mask=in_tile, other=0)
        slot = tl.load(entry_slot_ptr + entry + query_of_row, mask=in_tile, other=0)
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
                (acc * normal[:, None]).to(out_ptr.dtype.element_ty),
                mask=direct[:, None] & in_head,
            )
        if tl.reduce(partial.to(tl.int32), 0, tl.standard._elementwise_max) > 0:
            # Partial results keep 11 bits of mantissa relative to their row's largest element,
            # whatever the range of the cache's dtype.
            largest = tl.reduce(tl.abs(acc), 1, tl.standard._elementwise_max)
            largest = tl.maximum(largest, 1.0e-30)
            where = slot.to(tl.int64) * NUM_HEADS + head
            tl.store(
                partial_out_ptr + where[:, None] * HEAD_DIM + offs_d,
                (acc * (1.0 / largest)[:, None]).to(partial_out_ptr.dtype.element_ty),
                mask=partial[:, None] & in_head,
            )
            lse = tl.where(total > 0.0, maximum + tl.log2(safe_total), float("-inf"))
            tl.store(partial_lse_ptr + where, lse, mask=partial)
            tl.store(partial_scale_ptr + where, largest * normal, mask=partial)

    if OVERLAPPED:
        gdc_wait()
