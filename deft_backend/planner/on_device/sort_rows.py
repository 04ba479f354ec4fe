"""Device planner, 2: the depth-first order of the batch, and what neighbours in it share.

Ranks are made a permutation here whatever they are: a host may hold one prefix in two places and
hand out pages of both, and then equality is not monotone and ranks may collide. What neighbours
share is therefore looked up once more: the page before the cut must be the same in both.
"""

from __future__ import annotations

import triton.language as tl
from triton import jit
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@jit(do_not_specialize=["batch", "columns", "stride_table"])
def sort_rows(
    table_ptr,
    table_rows_ptr,
    seq_lens_ptr,
    rank_ptr,
    common_ptr,
    order_ptr,
    cut_ptr,
    below_ptr,
    batch,
    columns,
    stride_table,
    BATCH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """order [B]: row at each position; cut [B + 1]: tokens shared across the edge before it.

    Also sets `below` [2, B] to zero, into which ``find_nodes`` counts.
    """
    if OVERLAPPED:
        gdc_launch_dependents()
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = rows < batch
    other = tl.arange(0, BATCH)[None, :]
    pages = tl.load(seq_lens_ptr + rows, mask=is_row, other=0).to(tl.int32) // PAGE_SIZE
    pages = tl.minimum(tl.maximum(pages, 0), columns)
    table = tl.load(table_rows_ptr + rows, mask=is_row, other=0).to(tl.int64) * stride_table
    if OVERLAPPED:
        gdc_wait()

    rank = tl.load(rank_ptr + rows, mask=is_row, other=0)
    other_rank = tl.load(rank_ptr + other, mask=other < batch, other=BATCH)
    key = rank * BATCH + rows
    other_key = other_rank * BATCH + other
    before = other_key < key[:, None]
    position = tl.reduce(before.to(tl.int32), 1, tl.standard._sum_combine)
    last = tl.reduce(tl.where(before, other_key, -1), 1, tl.standard._elementwise_max)
    neighbour = tl.maximum(last, 0) % BATCH

    shared = tl.load(common_ptr + rows, mask=is_row, other=0) // PAGE_SIZE
    full = tl.load(seq_lens_ptr + neighbour, mask=is_row, other=0).to(tl.int32) // PAGE_SIZE
    there = is_row & (last >= 0) & (shared > 0) & (shared <= pages) & (shared <= full)
    beside = tl.load(table_rows_ptr + neighbour, mask=is_row, other=0).to(tl.int64) * stride_table
    page = tl.load(table_ptr + table + shared - 1, mask=there, other=-1)
    page_beside = tl.load(table_ptr + beside + shared - 1, mask=there, other=-2)
    cut = tl.where(there & (page == page_beside), shared * PAGE_SIZE, 0)

    tl.store(order_ptr + position, rows, mask=is_row)
    tl.store(cut_ptr + position, cut, mask=is_row)
    tl.store(cut_ptr + batch + rows, tl.full([BLOCK], 0, tl.int32), mask=rows == 0)
    tl.store(below_ptr + rows, tl.full([BLOCK], 0, tl.int32), mask=is_row)
    tl.store(below_ptr + BATCH + rows, tl.full([BLOCK], 0, tl.int32), mask=is_row)
