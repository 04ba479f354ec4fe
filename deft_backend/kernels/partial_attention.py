"""Stage 1: partial attention of KV ranges and query tiles (FlashForge's PAC, Algorithm 2).

For an item with queries Q and KV range K, V the kernel computes

    S   = Q K^T * sm_scale            (soft-capped: cap * tanh(S / cap))
    LSE = log2 sum_n 2^(S_n * log2 e)
    O   = softmax(S) V

with an online softmax over KV tiles and float32 accumulation (DeFT, section 3.1). The KV tile is
loaded once for every query of the tile and every query head of its GQA group: rows of the tile are
(query, head of the group) pairs, so that even a single query fills part of a tensor-core tile. An
item that is the whole of its query's attention writes the output; the others leave (O, LSE) for
stage 2.

Programs are persistent: they read how many items there are from the device and take every
``num_programs``-th, so one launch shape serves every plan.
"""

from __future__ import annotations

import triton
import triton.language as tl


def partial_attention(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    partial_out_ptr,
    partial_lse_ptr,
    page_table_ptr,
    table_rows_ptr,
    seq_lens_ptr,
    tile_ptr,
    item_segment_ptr,
    item_query_ptr,
    segment_row_ptr,
    segment_start_ptr,
    segment_end_ptr,
    segment_mask_ptr,
    mask_words_ptr,
    entry_query_ptr,
    entry_slot_ptr,
    sm_scale,
    logit_cap,
    stride_q_batch,
    stride_q_head,
    stride_k_page,
    stride_k_token,
    stride_k_head,
    stride_v_page,
    stride_v_token,
    stride_v_head,
    stride_out_batch,
    stride_out_head,
    stride_table,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    GQA_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    LOG2_E: tl.constexpr = 1.4426950408889634
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * GQA_GROUP

    first_item = tl.load(tile_ptr + TILE)
    work_end = tl.load(tile_ptr + TILE + 1) * NUM_KV_HEADS

    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, HEAD_DIM_PADDED)[None, :]
    in_head = offs_d < HEAD_DIM
    query_of_row = offs_m // GQA_GROUP
    head_of_row = offs_m % GQA_GROUP

    for work in range(first_item * NUM_KV_HEADS + tl.program_id(0), work_end, tl.num_programs(0)):
        # KV heads of one item are neighbours: they read the same page-table entries.
        item = work // NUM_KV_HEADS
        kv_head = work % NUM_KV_HEADS
        entry = tl.load(item_query_ptr + item)
        num_queries = tl.load(item_query_ptr + item + 1) - entry
        in_tile = query_of_row < num_queries
        query = tl.load(entry_query_ptr + entry + query_of_row, mask=in_tile, other=0)
        slot = tl.load(entry_slot_ptr + entry + query_of_row, mask=in_tile, other=0)
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
        k_head = k_ptr + kv_head.to(tl.int64) * stride_k_head
        v_head = v_ptr + kv_head.to(tl.int64) * stride_v_head

        segment_begin = tl.load(item_segment_ptr + item)
        segment_stop = tl.load(item_segment_ptr + item + 1)
        if MASKED:
            # Positions are counted through the item's segments, whose ends are only known now:
            # an open segment may have grown since the plan was made.
            begin = 0
            end = 0
            for segment in range(segment_begin, segment_stop):
                row = tl.load(segment_row_ptr + segment)
                stop = tl.load(segment_end_ptr + segment)
                if stop < 0:
                    stop = tl.load(seq_lens_ptr + row).to(tl.int32)
                end += tl.maximum(stop - tl.load(segment_start_ptr + segment), 0)
            table = page_table_ptr
        else:
            row = tl.load(segment_row_ptr + segment_begin)
            begin = tl.load(segment_start_ptr + segment_begin)
            end = tl.load(segment_end_ptr + segment_begin)
            if end < 0:
                end = tl.load(seq_lens_ptr + row).to(tl.int32)
            table = page_table_ptr + tl.load(table_rows_ptr + row).to(tl.int64) * stride_table

        for tile_begin in range(begin, end, BLOCK_N):
            position = tile_begin + offs_n
            in_range = position < end
            if MASKED:
                offset = 0
                owner = tl.full([BLOCK_N], 0, tl.int32)
                token = tl.full([BLOCK_N], 0, tl.int32)
                for segment in range(segment_begin, segment_stop):
                    row = tl.load(segment_row_ptr + segment)
                    start = tl.load(segment_start_ptr + segment)
                    stop = tl.load(segment_end_ptr + segment)
                    if stop < 0:
                        stop = tl.load(seq_lens_ptr + row).to(tl.int32)
                    length = tl.maximum(stop - start, 0)
                    inside = (position >= offset) & (position < offset + length)
                    owner = tl.where(inside, segment, owner)
                    token = tl.where(inside, position - offset + start, token)
                    offset += length
                row_of_token = tl.load(segment_row_ptr + owner, mask=in_range, other=0)
                table_row = tl.load(table_rows_ptr + row_of_token, mask=in_range, other=0)
                entry_of_token = page_table_ptr + table_row.to(tl.int64) * stride_table
                page = tl.load(entry_of_token + token // PAGE_SIZE, mask=in_range, other=0)
                # Bit `query_of_row` of the token's mask; no mask words: every query attends.
                words = tl.load(segment_mask_ptr + owner, mask=in_range, other=-1)
                word = tl.load(
                    mask_words_ptr + words[None, :] + (query_of_row // 64)[:, None],
                    mask=in_range[None, :] & (words[None, :] >= 0) & in_tile[:, None],
                    other=-1,
                )
                bit = (word >> (query_of_row % 64)[:, None].to(tl.int64)) & 1
                attends = (bit != 0) & in_range[None, :]
            else:
                token = position
                page = tl.load(table + token // PAGE_SIZE, mask=in_range, other=0)
                attends = in_range[None, :]

            page = page.to(tl.int64)
            if PAGE_SIZE == 1:
                k_offset = page * stride_k_page
                v_offset = page * stride_v_page
            else:
                in_page = token % PAGE_SIZE
                k_offset = page * stride_k_page + in_page * stride_k_token
                v_offset = page * stride_v_page + in_page * stride_v_token
            load_mask = in_range[:, None] & in_head
            k = tl.load(k_head + k_offset[:, None] + offs_d, mask=load_mask, other=0.0)
            if UPCAST:  # what a tensor core does with the operands; the interpreter cannot
                k = k.to(tl.float32)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * sm_scale
            if SOFT_CAP:
                # tanh through exp: saturates to +-1 without overflow in either direction.
                doubled = tl.exp2(scores * (2.0 * LOG2_E / logit_cap))
                scores = logit_cap * (1.0 - 2.0 / (doubled + 1.0))
            scores = tl.where(attends, scores * LOG2_E, float("-inf"))

            new_maximum = tl.maximum(maximum, tl.reduce(scores, 1, tl.standard._elementwise_max))
            # A row that has seen no token yet keeps its maximum at -inf: avoid -inf - -inf.
            reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            weights = tl.exp2(scores - reference[:, None])
            rescale = tl.exp2(maximum - reference)
            total = total * rescale + tl.reduce(weights, 1, tl.standard._sum_combine)
            v = tl.load(v_head + v_offset[:, None] + offs_d, mask=load_mask, other=0.0)
            acc = acc * rescale[:, None]
            if UPCAST:
                v = v.to(tl.float32)
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=PRECISION)
            maximum = new_maximum

        # An empty range contributes nothing: O = 0, LSE = -inf.
        safe_total = tl.where(total > 0.0, total, 1.0)
        result = acc / safe_total[:, None]
        lse = tl.where(total > 0.0, maximum + tl.log2(safe_total), float("-inf"))

        direct = in_tile & (slot < 0)
        tl.store(
            out_ptr
            + query.to(tl.int64)[:, None] * stride_out_batch
            + head[:, None] * stride_out_head
            + offs_d,
            result.to(out_ptr.dtype.element_ty),
            mask=direct[:, None] & in_head,
        )
        partial = in_tile & (slot >= 0)
        where = slot.to(tl.int64) * NUM_HEADS + head
        tl.store(
            partial_out_ptr + where[:, None] * HEAD_DIM + offs_d,
            result,
            mask=partial[:, None] & in_head,
        )
        tl.store(partial_lse_ptr + where, lse, mask=partial)


compiled = triton.jit(partial_attention)
