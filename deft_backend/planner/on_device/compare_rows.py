"""Device planner, 1: how many requests come before each in depth-first order, and what it shares.

Rows of the page table are ordered like words: by the first page in which they differ, a row before
those that go on where it ends. Sharers then stand side by side, and what a request shares with the
one before it is the longest that it shares with any before it.

Equality is monotone (the same page at a position means the same prefix), so the first difference
of two rows is found by binary search. All pairs search at once; most look at the same positions,
which the caches serve.
"""

from __future__ import annotations

import triton.language as tl
from triton import jit
from triton.language.extra.cuda import gdc_launch_dependents, globaltimer


@jit(do_not_specialize=["batch", "columns", "stride_table"])
def compare_rows(
    table_ptr,
    table_rows_ptr,
    seq_lens_ptr,
    rank_ptr,
    common_ptr,
    began_ptr,
    batch,
    columns,
    stride_table,
    BATCH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    STEPS: tl.constexpr,
    TIMED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """rank [B]: rows before each; common [B]: tokens that it shares with one of those.

    `columns` is the page table's width; STEPS halvings bring it to one page. began [1] int64: the
    GPU's clock.
    """
    if TIMED:
        if tl.program_id(0) == 0:
            tl.store(began_ptr, globaltimer())
    if OVERLAPPED:
        gdc_launch_dependents()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    other = tl.arange(0, BATCH)[None, :]
    is_row = row < batch
    is_other = other < batch
    # Only full pages are shared. No page is looked for beyond the table, whatever a length says.
    pages = tl.load(seq_lens_ptr + row, mask=is_row, other=0).to(tl.int32) // PAGE_SIZE
    pages = tl.minimum(tl.maximum(pages, 0), columns)
    other_pages = tl.load(seq_lens_ptr + other, mask=is_other, other=0).to(tl.int32) // PAGE_SIZE
    other_pages = tl.minimum(tl.maximum(other_pages, 0), columns)
    at = tl.load(table_rows_ptr + row, mask=is_row, other=0).to(tl.int64) * stride_table
    other_at = tl.load(table_rows_ptr + other, mask=is_other, other=0).to(tl.int64) * stride_table
    table = table_ptr + at
    other_table = table_ptr + other_at

    # The first page settles requests that share nothing.
    first = tl.load(table, mask=pages > 0, other=-1)
    other_first = tl.load(other_table, mask=other_pages > 0, other=-2)
    limit = tl.where(row == other, 0, tl.minimum(pages, other_pages))
    alike = first == other_first
    low = tl.where(alike & (limit > 0), 1, 0)
    high = tl.where(alike, limit, 0)
    for _ in range(STEPS):  # agree on the first `low` pages, not on the first `high + 1`
        searching = low < high
        middle = (low + high + 1) // 2
        page = tl.load(table + middle - 1, mask=searching, other=0)
        other_page = tl.load(other_table + middle - 1, mask=searching, other=0)
        low = tl.where(searching & (page == other_page), middle, low)
        high = tl.where(searching & (page != other_page), middle - 1, high)

    differ = low < limit
    page = tl.load(table + low, mask=differ, other=0)
    other_page = tl.load(other_table + low, mask=differ, other=0)
    shorter = (other_pages < pages) | ((other_pages == pages) & (other < row))
    before = (
        ((differ & (other_page < page)) | ((differ == 0) & shorter)) & is_other & (row != other)
    )
    rank = tl.reduce(before.to(tl.int32), 1, tl.standard._sum_combine)
    common = tl.reduce(tl.where(before, low, 0), 1, tl.standard._elementwise_max)

    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(rank_ptr + rows, rank, mask=rows < batch)
    tl.store(common_ptr + rows, common * PAGE_SIZE, mask=rows < batch)
