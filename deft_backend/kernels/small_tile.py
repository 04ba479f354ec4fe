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

from deft_backend.kernels.plain_parts import capped, load_queries, write_results
from deft_backend.planner import encoding_constants


@jit
def _attend(q, k, v, acc, maximum, total, inside, scaling, MODE: tl.constexpr):
    """One block of the online softmax: k is [N, D], v [D, N], acc [D, M]; never empty."""
    if MODE.upcast:  # what a tensor core does with the operands; the interpreter cannot
        k = k.to(tl.float32)
        v = v.to(tl.float32)
    scores = tl.dot(k, tl.trans(q), input_precision=MODE.precision)
    scores, factor = capped(scores, scaling, MODE.soft_cap)
    scores = tl.where(inside[:, None], scores, float("-inf"))
    highest = tl.reduce(scores, 0, tl.standard._elementwise_max) * factor
    new_maximum = tl.maximum(maximum, highest)
    weights = tl.exp2(scores * factor - new_maximum[None, :])
    rescale = tl.exp2(maximum - new_maximum)
    total = total * rescale + tl.reduce(weights, 0, tl.standard._sum_combine)
    acc = acc * rescale[None, :]
    acc = tl.dot(v, weights.to(v.dtype), acc, input_precision=MODE.precision)
    return acc, new_maximum, total


@jit
def _read_item(work, work_end, plan, HEADS: tl.constexpr):
    """First link of the chain: entries, row, start and end. Of no item: those of an empty one."""
    item = work // HEADS.num_kv  # item and segment are one: see TILE_SEGMENTS
    there = work < work_end
    entry = tl.load(plan.item_query_ptr + item, mask=there, other=0)
    entry_end = tl.load(plan.item_query_ptr + item + 1, mask=there, other=0)
    row = tl.load(plan.segment_request + item, mask=there, other=0)
    start = tl.load(plan.segment_start + item, mask=there, other=0)
    stop = tl.load(plan.segment_end + item, mask=there, other=0)
    return entry, entry_end, row, start, stop


@jit
def _read_row(work, work_end, row, tensors, HEADS: tl.constexpr, CACHE: tl.constexpr):
    """Second link: tokens of the row's sequence, and its row of the page table."""
    length = tl.load(tensors.seq_lens + row).to(tl.int32)
    listed = work // HEADS.num_kv if CACHE.table_by_segment else row
    table = tl.load(tensors.table_rows + listed, mask=work < work_end, other=0)
    return length, table.to(tl.int64)


@jit
def small_tile_attention(
    tensors, plan, scaling, strides, HEADS: tl.constexpr, CACHE: tl.constexpr, TILE: tl.constexpr,
    MODE: tl.constexpr,
):  # fmt: skip
    NUM_HEADS: tl.constexpr = HEADS.num_kv * HEADS.group
    MERGES: tl.constexpr = encoding_constants.MERGES.value
    if MODE.overlapped:
        gdc_launch_dependents()

    work_end = tl.load(plan.tile_ptr + TILE.place + 1) * HEADS.num_kv
    first_work = tl.load(plan.tile_ptr + TILE.place) * HEADS.num_kv + tl.program_id(0)
    step = tl.num_programs(0)

    offs_m = tl.arange(0, TILE.height)
    offs_n = tl.arange(0, TILE.block_tokens)
    offs_d = tl.arange(0, HEADS.padded_dim)[None, :]
    in_head = offs_d < HEADS.dim
    query_of_row = offs_m // HEADS.group
    head_of_row = offs_m % HEADS.group

    entry, entry_end, row, start, stop = _read_item(first_work, work_end, plan, HEADS)
    next_entry, next_entry_end, next_row, next_start, next_stop = _read_item(
        first_work + step, work_end, plan, HEADS
    )
    row_length, table_row = _read_row(first_work, work_end, row, tensors, HEADS, CACHE)

    for work in range(first_work, work_end, step):
        # KV heads of one item are neighbours: they read the same page-table entries.
        kv_head = work % HEADS.num_kv
        head = kv_head * HEADS.group + head_of_row
        in_tile = query_of_row < entry_end - entry
        table = tensors.page_table + table_row * strides.table
        # An open range ends where its row's sequence ends now.
        length = tl.maximum(tl.where(stop < 0, row_length, stop) - start, 0)
        page = tl.load(table + (start + offs_n) // CACHE.page_size, mask=offs_n < length, other=0)
        query = tl.load(plan.entry_query + entry + query_of_row, mask=in_tile, other=0)

        # The next items' links, whose addresses are here since the item before.
        next_row_length, next_table_row = _read_row(
            work + step, work_end, next_row, tensors, HEADS, CACHE
        )
        later_entry, later_entry_end, later_row, later_start, later_stop = _read_item(
            work + 2 * step, work_end, plan, HEADS
        )

        q = load_queries(tensors, strides, query, head, in_tile, HEADS, MODE.upcast)
        maximum = tl.full([TILE.height], float("-inf"), tl.float32)
        total = tl.full([TILE.height], 0.0, tl.float32)
        acc = tl.full([HEADS.padded_dim, TILE.height], 0.0, tl.float32)
        k_head = tensors.k + kv_head.to(tl.int64) * CACHE.k_head
        v_head = tensors.v + kv_head.to(tl.int64) * CACHE.v_head
        for begin in range(0, length, TILE.block_tokens):
            inside = offs_n < length - begin
            in_page = (start + begin + offs_n) % CACHE.page_size
            k_offset = page.to(tl.int64) * CACHE.k_page + in_page * CACHE.k_token
            v_offset = page.to(tl.int64) * CACHE.v_page + in_page * CACHE.v_token
            k = tl.load(
                k_head + k_offset[:, None] + offs_d, mask=inside[:, None] & in_head, other=0.0
            )
            v = tl.load(
                v_head + v_offset[None, :] + tl.trans(offs_d),
                mask=inside[None, :] & tl.trans(in_head),
                other=0.0,
            )
            ahead = begin + TILE.block_tokens + offs_n
            page = tl.load(table + (start + ahead) // CACHE.page_size, mask=ahead < length, other=0)
            acc, maximum, total = _attend(q, k, v, acc, maximum, total, inside, scaling, MODE)
        result = tl.trans(acc)

        # Read again rather than held in registers through the loop.
        query = tl.load(plan.entry_query + entry + query_of_row, mask=in_tile, other=0)
        slot = tl.load(plan.entry_slot + entry + query_of_row, mask=in_tile, other=0)
        merged = tl.load(plan.segment_span + work // HEADS.num_kv)
        if merged > 0:
            if MODE.overlapped:
                gdc_wait()
            first_slot = MERGES - slot.to(tl.int64)
            for part in range(0, merged):
                at = (first_slot + part) * NUM_HEADS + head
                part_lse = tl.load(tensors.partial.lse + at, mask=in_tile, other=float("-inf"))
                part_scale = tl.load(tensors.partial.scale + at, mask=in_tile, other=0.0)
                part_out = tl.load(
                    tensors.partial.out + at[:, None] * HEADS.dim + offs_d,
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

        write_results(result, maximum, total, query, slot, head, in_tile, tensors, strides, HEADS)

        row_length, table_row = next_row_length, next_table_row
        entry, entry_end, row, start, stop = (
            next_entry, next_entry_end, next_row, next_start, next_stop,
        )  # fmt: skip
        next_entry, next_entry_end, next_row, next_start, next_stop = (
            later_entry, later_entry_end, later_row, later_start, later_stop,
        )  # fmt: skip

    if MODE.overlapped:
        gdc_wait()
