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

from deft_backend.kernels.plain_parts import capped, load_queries, write_results
from deft_backend.planner import encoding_constants


@jit
def _attend(
    q, k, v, acc, maximum, total, allowed, scaling, MASKED: tl.constexpr, MODE: tl.constexpr
):
    """One block of the online softmax."""
    if MODE.upcast:  # what a tensor core does with the operands; the interpreter cannot
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    scores = tl.dot(q, tl.trans(k), input_precision=MODE.precision)
    scores, factor = capped(scores, scaling, MODE.soft_cap)
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
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision=MODE.precision)
    return acc, new_maximum, total


@jit
def _locate(
    position, total, offset, code, first_segment, tensors, plan, strides, CACHE: tl.constexpr,
    SHIFT: tl.constexpr,
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
    span = tl.load(plan.segment_span + segment, mask=inside, other=0)
    listed = segment
    if not CACHE.table_by_segment:
        listed = tl.load(plan.segment_request + segment, mask=inside, other=0)
    table_row = tl.load(tensors.table_rows + listed, mask=inside, other=0)
    entry = tensors.page_table + table_row.to(tl.int64) * strides.table + token // CACHE.page_size
    page = tl.load(entry, mask=inside, other=0)
    return page, token % CACHE.page_size, span


@jit
def partial_attention(
    tensors, plan, scaling, strides, HEADS: tl.constexpr, CACHE: tl.constexpr, TILE: tl.constexpr,
    MODE: tl.constexpr,
):  # fmt: skip
    # Bits that hold a segment's shift from positions in the item to positions in its row.
    SHIFT: tl.constexpr = 26
    SPAN_SHIFT: tl.constexpr = encoding_constants.SPAN_SHIFT.value
    SPAN_MASK: tl.constexpr = encoding_constants.SPAN_MASK.value
    if MODE.overlapped:
        gdc_launch_dependents()

    first_item = tl.load(plan.tile_ptr + TILE.place)
    work_end = tl.load(plan.tile_ptr + TILE.place + 1) * HEADS.num_kv

    offs_m = tl.arange(0, TILE.height)
    offs_n = tl.arange(0, TILE.block_tokens)
    offs_s = tl.arange(0, TILE.block_segments)
    offs_d = tl.arange(0, HEADS.padded_dim)[None, :]
    in_head = offs_d < HEADS.dim
    query_of_row = offs_m // HEADS.group
    head_of_row = offs_m % HEADS.group

    for work in range(first_item * HEADS.num_kv + tl.program_id(0), work_end, tl.num_programs(0)):
        # KV heads of one item are neighbours: they read the same page-table entries.
        item = work // HEADS.num_kv
        kv_head = work % HEADS.num_kv
        if TILE.block_segments > 1:
            first_segment = tl.load(plan.item_segment_ptr + item)
            num_segments = tl.load(plan.item_segment_ptr + item + 1) - first_segment
        else:  # every item of this shape, and of the shapes before it, has one
            first_segment = item
            num_segments = 1
        entry = tl.load(plan.item_query_ptr + item)
        num_queries = tl.load(plan.item_query_ptr + item + 1) - entry
        in_tile = query_of_row < num_queries
        query = tl.load(plan.entry_query + entry + query_of_row, mask=in_tile, other=0)
        head = kv_head * HEADS.group + head_of_row

        q = load_queries(tensors, strides, query, head, in_tile, HEADS, MODE.upcast)
        maximum = tl.full([TILE.height], float("-inf"), tl.float32)
        total = tl.full([TILE.height], 0.0, tl.float32)
        acc = tl.full([TILE.height, HEADS.padded_dim], 0.0, tl.float32)
        k_head = tensors.k + kv_head.to(tl.int64) * CACHE.k_head
        v_head = tensors.v + kv_head.to(tl.int64) * CACHE.v_head

        # The item's first segment, if every query attends to it.
        row = tl.load(plan.segment_request + first_segment)
        start = tl.load(plan.segment_start + first_segment)
        stop = tl.load(plan.segment_end + first_segment)
        if stop < 0:  # open: it ends where its row's sequence ends now
            stop = tl.load(tensors.seq_lens + row).to(tl.int32)
        listed = first_segment if CACHE.table_by_segment else row
        table_row = tl.load(tensors.table_rows + listed).to(tl.int64)
        table = tensors.page_table + table_row * strides.table
        length = tl.maximum(stop - start, 0)
        if TILE.block_segments > 1:
            if tl.load(plan.segment_span + first_segment) != num_queries << SPAN_SHIFT:
                length = 0
        done = length // TILE.block_tokens * TILE.block_tokens
        ahead = start + offs_n
        page = tl.load(table + ahead // CACHE.page_size, mask=offs_n < length, other=0)
        for begin in range(0, done, TILE.block_tokens):
            in_page = (start + begin + offs_n) % CACHE.page_size
            k_offset = page.to(tl.int64) * CACHE.k_page + in_page * CACHE.k_token
            v_offset = page.to(tl.int64) * CACHE.v_page + in_page * CACHE.v_token
            k = tl.load(k_head + k_offset[:, None] + offs_d, mask=in_head, other=0.0)
            v = tl.load(v_head + v_offset[:, None] + offs_d, mask=in_head, other=0.0)
            ahead = begin + TILE.block_tokens + offs_n
            page = tl.load(table + (start + ahead) // CACHE.page_size, mask=ahead < length, other=0)
            acc, maximum, total = _attend(q, k, v, acc, maximum, total, True, scaling, False, MODE)
        if done < length:  # its last tokens; `page` holds their pages
            inside = offs_n < length - done
            in_page = (start + done + offs_n) % CACHE.page_size
            k_offset = page.to(tl.int64) * CACHE.k_page + in_page * CACHE.k_token
            v_offset = page.to(tl.int64) * CACHE.v_page + in_page * CACHE.v_token
            present = inside[:, None] & in_head
            k = tl.load(k_head + k_offset[:, None] + offs_d, mask=present, other=0.0)
            v = tl.load(v_head + v_offset[:, None] + offs_d, mask=present, other=0.0)
            acc, maximum, total = _attend(
                q, k, v, acc, maximum, total, inside[None, :], scaling, True, MODE
            )

        if TILE.block_segments > 1:
            present = offs_s < num_segments
            segment = first_segment + offs_s
            row_of = tl.load(plan.segment_request + segment, mask=present, other=0)
            start_of = tl.load(plan.segment_start + segment, mask=present, other=0)
            stop_of = tl.load(plan.segment_end + segment, mask=present, other=0)
            length_of = tl.load(tensors.seq_lens + row_of, mask=present & (stop_of < 0), other=0)
            stop_of = tl.where(stop_of < 0, length_of.to(tl.int32), stop_of)
            start_of += tl.where(offs_s == 0, length, 0)
            tokens = tl.maximum(stop_of - start_of, 0)
            offset = tl.associative_scan(tokens, 0, tl.standard._sum_combine)
            remaining = tl.reduce(tokens, 0, tl.standard._sum_combine)
            offset -= tokens
            code = (offs_s << SHIFT) + (start_of - offset + (1 << (SHIFT - 1)))
            offset = tl.where(present, offset, remaining)

            page, in_page, span = _locate(
                offs_n, remaining, offset, code, first_segment, tensors, plan, strides, CACHE,
                SHIFT,
            )  # fmt: skip
            for begin in range(0, remaining, TILE.block_tokens):
                inside = begin + offs_n < remaining
                k_offset = page.to(tl.int64) * CACHE.k_page + in_page * CACHE.k_token
                v_offset = page.to(tl.int64) * CACHE.v_page + in_page * CACHE.v_token
                load_mask = inside[:, None] & in_head
                k = tl.load(k_head + k_offset[:, None] + offs_d, mask=load_mask, other=0.0)
                v = tl.load(v_head + v_offset[:, None] + offs_d, mask=load_mask, other=0.0)
                # Tokens outside the item have span 0: no row attends to them.
                allowed = (query_of_row[:, None] >= (span & SPAN_MASK)[None, :]) & (
                    query_of_row[:, None] < (span >> SPAN_SHIFT)[None, :]
                )
                page, in_page, span = _locate(
                    begin + TILE.block_tokens + offs_n, remaining, offset, code, first_segment,
                    tensors, plan, strides, CACHE, SHIFT,
                )  # fmt: skip
                acc, maximum, total = _attend(
                    q, k, v, acc, maximum, total, allowed, scaling, True, MODE
                )

        # Read again rather than held in registers through the loops.
        query = tl.load(plan.entry_query + entry + query_of_row, mask=in_tile, other=0)
        slot = tl.load(plan.entry_slot + entry + query_of_row, mask=in_tile, other=0)
        write_results(acc, maximum, total, query, slot, head, in_tile, tensors, strides, HEADS)

    if MODE.overlapped:
        gdc_wait()
