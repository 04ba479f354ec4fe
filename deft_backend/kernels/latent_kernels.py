"""Bring a plan to the host's MLA kernel: its items become the entries of a call.

The kernel runs once a step, because leaves grow. Every item is an entry: its queries, its row of
the page table, and its KV range. `Merges` says for each request which rows of the call's result
belong to it. Queries are gathered, and results merged, in each layer:

O = sum_i O_i exp(LSE_i) / sum_i exp(LSE_i)                     (DeFT, equation 1)
"""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl
from triton import jit

from deft_backend.planner import encoding
from deft_backend.planner.device_plan import ItemArrays, Pointer, ReduceArrays


class KernelBatch(NamedTuple):
    """The batch of a call, as the host's kernel takes it. Entries behind the last are empty."""

    query_start: Pointer  # [N + 1] int32: each entry's first query token in the tensors of queries
    table_rows: Pointer  # [N] int32: the row of the page table that holds the entry's KV
    # [N] int32: first token of the entry's KV range in that row, and the one after its last.
    begin: Pointer
    end: Pointer


class Merges(NamedTuple):
    """Where the partial results of each request are."""

    source: Pointer  # [entries] int32: request of each entry of the plan
    count: Pointer  # [1] int32: entries of the plan
    first: Pointer  # [B] int32: first of the request's places in `entry`
    parts: Pointer  # [B] int32: how many they are; 0 for a padding request
    entry: Pointer
    """[slots + B] int32: entry of the plan at each place. The last B belong to requests whose
    attention is one item."""


@jit(do_not_specialize=["requests", "most_items", "most_entries", "slots"])
def lay_out(
    items: ItemArrays,
    reduction: ReduceArrays,
    table_rows_ptr,
    seq_lens_ptr,
    batch: KernelBatch,
    leaves: KernelBatch,
    merges: Merges,
    requests,
    most_items,
    most_entries,
    slots,
    APART: tl.constexpr,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write `batch` and `merges`; each program does so for BLOCK items, entries and requests.

    A request has TOKENS query tokens. With APART, leaves get a call of their own, `leaves`, in the
    order of requests, and their entries in `batch` are empty: query tokens see one another there,
    and those of nodes do not.
    """
    DIRECT: tl.constexpr = encoding.DIRECT
    OPEN_END: tl.constexpr = encoding.OPEN_END
    LAST: tl.constexpr = len(encoding.ITEM_ORDER)
    lane = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    num_items = tl.load(items.tile_ptr + LAST)
    num_entries = tl.load(items.item_query_ptr + num_items)

    is_item = lane < num_items
    entry = tl.load(
        items.item_query_ptr + tl.minimum(lane, num_items), mask=lane <= most_items, other=0
    )
    request = tl.load(items.segment_request + lane, mask=is_item, other=0)
    table_row = tl.load(table_rows_ptr + lane, mask=is_item, other=0)
    begin = tl.load(items.segment_start + lane, mask=is_item, other=0)
    end = tl.load(items.segment_end + lane, mask=is_item, other=0)
    is_leaf = is_item & (end == OPEN_END)
    length = tl.load(seq_lens_ptr + request, mask=is_leaf, other=0).to(tl.int32)
    end = tl.where(is_leaf, length, end)
    inside = lane < most_items
    tl.store(batch.query_start + lane, entry * TOKENS, mask=lane <= most_items)
    tl.store(batch.table_rows + lane, table_row, mask=inside)
    tl.store(batch.begin + lane, begin, mask=inside)
    if APART:
        tl.store(batch.end + lane, tl.where(is_leaf, begin, end), mask=inside)
        tl.store(leaves.table_rows + request, table_row, mask=is_leaf)
        tl.store(leaves.begin + request, begin, mask=is_leaf)
        tl.store(leaves.end + request, end, mask=is_leaf)
    else:
        tl.store(batch.end + lane, end, mask=inside)

    # A plan covers the first requests; those behind them are padding. Each has one leaf.
    leaf_count = tl.full((BLOCK,), 0, tl.int32)
    for start in range(0, num_items, BLOCK):
        every = start + tl.arange(0, BLOCK)
        ends = tl.load(items.segment_end + every, mask=every < num_items, other=0)
        leaf_count += (ends == OPEN_END).to(tl.int32)
    planned = tl.reduce(leaf_count, 0, tl.standard._sum_combine)
    is_padding = (lane >= planned) & (lane < requests)
    tl.store(merges.first + lane, 0, mask=is_padding)
    tl.store(merges.parts + lane, 0, mask=is_padding)
    if APART:
        tl.store(leaves.table_rows + lane, 0, mask=is_padding)
        tl.store(leaves.begin + lane, 0, mask=is_padding)
        tl.store(leaves.end + lane, 0, mask=is_padding)

    is_entry = lane < num_entries
    query = tl.load(items.entry_query + lane, mask=is_entry, other=0)
    slot = tl.load(items.entry_slot + lane, mask=is_entry, other=0)
    is_whole = is_entry & (slot == DIRECT)
    slot = tl.where(is_whole, slots + query, slot)
    tl.store(merges.source + lane, query, mask=is_entry)
    tl.store(merges.entry + slot, lane, mask=is_entry)
    tl.store(merges.first + query, slot, mask=is_whole)
    tl.store(merges.parts + query, 1, mask=is_whole)

    is_reduced = lane < tl.load(reduction.num_reduce)
    query = tl.load(reduction.reduce_query + lane, mask=is_reduced, other=0)
    first = tl.load(reduction.reduce_ptr + lane, mask=is_reduced, other=0)
    last = tl.load(reduction.reduce_ptr + lane + 1, mask=is_reduced, other=0)
    tl.store(merges.first + query, first, mask=is_reduced)
    tl.store(merges.parts + query, last - first, mask=is_reduced)
    tl.store(merges.count, num_entries, mask=tl.program_id(0) == 0)


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
    """Copy each entry's contiguous query vectors to its place, BLOCK_H heads of a token a
    program.
    """
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


@jit
def _weighed(maximum, total, acc, out_ptr, lse_ptr, row, rows, head, HEADS, VALUE_DIM):
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
                maximum,
                total,
                acc,
                leaf_out_ptr,
                leaf_lse_ptr,
                at,
                leaf_rows,
                head,
                HEADS,
                VALUE_DIM,
            )
    for place in range(first, first + parts):
        row = tl.load(merges.entry + place).to(tl.int64) * TOKENS + token
        maximum, total, acc = _weighed(
            maximum, total, acc, part_out_ptr, part_lse_ptr, row, rows, head, HEADS, VALUE_DIM
        )
    result = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    value = tl.arange(0, VALUE_DIM)[None, :]
    to = at * out_row + head[:, None] * out_head + value
    tl.store(out_ptr + to, result.to(out_ptr.dtype.element_ty), mask=(head < HEADS)[:, None])
