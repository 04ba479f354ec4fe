"""Stage 1 for the small tile: partial attention of few queries over one KV range.

    S = Q K^T * sm_scale,   LSE = log2 sum_n 2^(S_n * log2 e),   O = softmax(S) V

(FlashForge's PAC, Algorithm 2.) This kernel has the items, arguments and results of
`partial_attention`. A small tile reuses little KV, so the kernel keeps many loads in flight:

- A program is one warp, which meets no barrier. An SM holds many. (`configurations.py` has one case
  of four warps.)
- The tensor cores compute S^T = K Q^T and O^T = V^T P^T: a tile of eight columns wastes little on a
  GQA group of four heads and holds half the registers.
- An item is a chain of loads: the item, its row of the page table, page ids, keys and values. Each
  load gives the addresses of the next. While a program works on one item, it starts the first loads
  of its next two items. It waits only for the last load.

An item may **merge** the partial results that earlier launches left for its query. It then writes
the query's output, and stage 2 has nothing to do for that query.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton import jit
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deft_backend.kernels.arguments import Scaling, Strides, Tensors
from deft_backend.kernels.plain.eight_bits import operand
from deft_backend.kernels.plain.parts import (
    Online,
    Segment,
    capped,
    kv_offsets,
    load_queries,
    seen_by_all,
    sees,
    tail_of,
    vectors_of,
    with_device_scales,
    write_results,
)
from deft_backend.planner import encoding
from deft_backend.planner.device_plan import ItemArrays


class Item(NamedTuple):
    """First link of the chain of loads: what the plan says of an item."""

    entry: Any  # its first entry, and the one after its last
    entry_end: Any
    request: Any
    start: Any
    stop: Any


class Row(NamedTuple):
    """Second link: the sequence length of the item's request, and its row of the page table."""

    length: Any
    table_row: Any


@jit
def _read_item(work, work_end, plan, HEADS):
    """Without an item, an empty one."""
    number = work // HEADS.num_kv  # of the item and of its only segment
    there = work < work_end
    entry = tl.load(plan.item_query_ptr + number, mask=there, other=0)
    entry_end = tl.load(plan.item_query_ptr + number + 1, mask=there, other=0)
    request = tl.load(plan.segment_request + number, mask=there, other=0)
    start = tl.load(plan.segment_start + number, mask=there, other=0)
    stop = tl.load(plan.segment_end + number, mask=there, other=0)
    return Item(entry, entry_end, request, start, stop)


@jit
def _read_row(work, work_end, item, tensors, HEADS):
    length = tl.load(tensors.seq_lens + item.request).to(tl.int32)
    table_row = tl.load(tensors.table_rows + work // HEADS.num_kv, mask=work < work_end, other=0)
    return Row(length, table_row.to(tl.int64))


@jit
def _attend(online, q, k, v, inside, scaling, MASKED, CACHE, MODE):
    """The softmax with one more block: q [M, D], k [N, D], v [D, N], inside [N, 1] or [N, M].

    Only if MASKED, a query vector may see no token of the block.
    """
    k = operand(k, q.dtype, CACHE.exponent_bits, MODE.upcast)
    v = operand(v, q.dtype, CACHE.exponent_bits, MODE.upcast)
    scores = tl.dot(k, tl.trans(q))
    scores, factor = capped(scores, scaling, MODE.soft_cap)
    scores = tl.where(inside, scores, float("-inf"))
    highest = tl.reduce(scores, 0, tl.standard._elementwise_max) * factor
    maximum = tl.maximum(online.maximum, highest)
    reference = maximum
    if MASKED:  # avoid -inf - -inf
        reference = tl.where(maximum == float("-inf"), 0.0, maximum)
    weights = tl.exp2(scores * factor - reference[None, :])
    rescale = tl.exp2(online.maximum - reference)
    total = online.total * rescale + tl.reduce(weights, 0, tl.standard._sum_combine)
    acc = online.acc * rescale[None, :]
    acc = tl.dot(v, weights.to(v.dtype), acc)
    return Online(acc, maximum, total)


@jit
def _attend_range(
    q, page, segment, kv_head, tail, clear, tensors, scaling, HEADS, CACHE, TILE, MODE
):
    """The softmax of a KV range; `page` [N] are the page ids of its first block.

    Every query vector sees the range's first `clear` tokens; `tail` tells who sees the others. The
    page ids of the block that is loaded next are in registers.
    """
    offs_n = tl.arange(0, TILE.block_tokens)
    offs_d = tl.arange(0, HEADS.padded_dim)[None, :]
    in_head = offs_d < HEADS.dim
    table, start, length = segment.table, segment.start, segment.length
    online = Online(
        tl.full([HEADS.padded_dim, TILE.height], 0.0, tl.float32),
        tl.full([TILE.height], float("-inf"), tl.float32),
        tl.full([TILE.height], 0.0, tl.float32),
    )
    head = kv_head.to(tl.int64) * CACHE.head
    k_head, v_head = tensors.k + head, tensors.v + head
    for begin in range(0, length, TILE.block_tokens):
        inside = offs_n < length - begin
        offset = kv_offsets(page, start + begin + offs_n, CACHE)
        k = tl.load(k_head + offset[:, None] + offs_d, mask=inside[:, None] & in_head, other=0)
        v = tl.load(
            v_head + offset[None, :] + tl.trans(offs_d),
            mask=inside[None, :] & tl.trans(in_head),
            other=0,
        )
        ahead = begin + TILE.block_tokens + offs_n
        page = tl.load(table + (start + ahead) // CACHE.page_size, mask=ahead < length, other=0)
        if HEADS.single:
            online = _attend(online, q, k, v, inside[:, None], scaling, False, CACHE, MODE)
        else:
            visible = inside[:, None] & (tl.arange(0, TILE.height) >= 0)[None, :]
            if begin + TILE.block_tokens > clear:
                visible &= tl.trans(sees(start + begin + offs_n, tail, tensors, HEADS))
            online = _attend(online, q, k, v, visible, scaling, True, CACHE, MODE)
    return Online(tl.trans(online.acc), online.maximum, online.total)


@jit
def _merge(online, merged, first_slot, vectors, tensors, HEADS):
    """The softmax with the partial results of `merged` neighbouring slots (DeFT, equation 1)."""
    offs_d = tl.arange(0, HEADS.padded_dim)[None, :]
    acc, maximum, total = online.acc, online.maximum, online.total
    for part in range(0, merged):
        at = (first_slot + part) * (HEADS.num_kv * HEADS.vectors) + vectors.result
        lse = tl.load(tensors.partial.lse + at, mask=vectors.there, other=float("-inf"))
        scale = tl.load(tensors.partial.scale + at, mask=vectors.there, other=0.0)
        out = tl.load(
            tensors.partial.out + at[:, None] * HEADS.dim + offs_d,
            mask=vectors.there[:, None] & (offs_d < HEADS.dim),
            other=0.0,
        )
        new_maximum = tl.maximum(maximum, lse)
        # Empty ranges have LSE = -inf and weigh nothing: avoid -inf - -inf.
        reference = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        rescale = tl.exp2(maximum - reference)
        weight = tl.exp2(lse - reference)
        total = total * rescale + weight
        acc = acc * rescale[:, None]
        acc += out.to(tl.float32) * (weight * scale)[:, None]
        maximum = new_maximum
    return Online(acc, maximum, total)


@jit
def small_tile_attention(
    tensors: Tensors,
    plan: ItemArrays,
    scaling: Scaling,
    strides: Strides,
    HEADS: tl.constexpr,
    CACHE: tl.constexpr,
    TILE: tl.constexpr,
    MODE: tl.constexpr,
):
    MERGES: tl.constexpr = encoding.MERGES
    if MODE.overlapped:
        gdc_launch_dependents()

    scaling = with_device_scales(scaling, tensors, MODE)
    work_end = tl.load(plan.tile_ptr + TILE.place + 1) * HEADS.num_kv
    first_work = tl.load(plan.tile_ptr + TILE.place) * HEADS.num_kv + tl.program_id(0)
    step = tl.num_programs(0)
    offs_m = tl.arange(0, TILE.height)
    offs_n = tl.arange(0, TILE.block_tokens)
    query_of_row = offs_m // HEADS.vectors

    item = _read_item(first_work, work_end, plan, HEADS)
    next_item = _read_item(first_work + step, work_end, plan, HEADS)
    row = _read_row(first_work, work_end, item, tensors, HEADS)

    for work in range(first_work, work_end, step):
        # KV heads of one item are neighbours: they read the same page-table entries.
        kv_head = work % HEADS.num_kv
        queries = item.entry_end - item.entry
        table = tensors.page_table + row.table_row * strides.table
        start = item.start
        # An open range ends where its request's sequence ends now.
        length = tl.maximum(tl.where(item.stop < 0, row.length, item.stop) - start, 0)
        page = tl.load(table + (start + offs_n) // CACHE.page_size, mask=offs_n < length, other=0)
        vectors = vectors_of(item.entry, queries, kv_head, tensors, plan, HEADS, TILE)

        # The next items' links: their addresses have been here since the item before.
        next_row = _read_row(work + step, work_end, next_item, tensors, HEADS)
        later_item = _read_item(work + 2 * step, work_end, plan, HEADS)

        q = load_queries(tensors, strides, vectors, HEADS, MODE.upcast)
        tail, clear = 0, length
        if not HEADS.single:
            tail = tail_of(item.entry, queries, tensors, plan, strides, HEADS, TILE)
            clear = seen_by_all(tail, vectors.there, start, length)
        segment = Segment(table, start, length)
        online = _attend_range(
            q, page, segment, kv_head, tail, clear, tensors, scaling, HEADS, CACHE, TILE, MODE
        )

        if CACHE.exponent_bits > 0:
            online = Online(online.acc * scaling.value, online.maximum, online.total)
        # Read again: held in registers through the loop, they would cost more.
        vectors = vectors_of(item.entry, queries, kv_head, tensors, plan, HEADS, TILE)
        in_tile = query_of_row < queries
        slot = tl.load(plan.entry_slot + item.entry + query_of_row, mask=in_tile, other=0)
        merged = tl.load(plan.segment_span + work // HEADS.num_kv)
        if merged > 0:
            if MODE.overlapped:
                gdc_wait()
            first_slot = MERGES - slot.to(tl.int64)
            online = _merge(online, merged, first_slot, vectors, tensors, HEADS)
        write_results(online, vectors, slot, tensors, strides, HEADS, MODE)

        row, item, next_item = next_row, next_item, later_item

    if MODE.overlapped:
        gdc_wait()
