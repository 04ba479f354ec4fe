"""Device planner, 1: how many requests come before each in depth-first order, and what it shares.

Rows of the page table are ordered like words: by the first page in which they differ, a row before
those that go on where it ends. Sharers then stand side by side, and what a request shares with the
one before it is the longest that it shares with any before it.

Equality is monotone (the same page at a position means the same prefix), so the first difference
of two rows is found by binary search. It starts where the two differed in the plan before: from one
step to the next hardly any pair changes, and two pages of each row prove that it did not. A guess
only ever saves halvings, so nothing has to be invalidated when requests come and go.
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
    guess_ptr,
    began_ptr,
    batch,
    columns,
    stride_table,
    BATCH: tl.constexpr,
    BLOCK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TIMED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """rank [B]: rows before each; common [B]: tokens that it shares with one of those.

    `columns` is the page table's width. guess [BATCH, BATCH]: pages that each two rows had in
    common in the plan before, or any number from 0; set to those that they have now. began [1]
    int64: the GPU's clock.
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
    limit = tl.where(row == other, 0, tl.minimum(pages, other_pages))

    guess_at = guess_ptr + row * BATCH + other
    is_pair = is_row & is_other
    guess = tl.load(guess_at, mask=is_pair, other=0)
    guessed = tl.minimum(guess, limit)
    last = tl.load(table + guessed - 1, mask=guessed > 0, other=-1)
    other_last = tl.load(other_table + guessed - 1, mask=guessed > 0, other=-1)
    next_page = tl.load(table + guessed, mask=guessed < limit, other=-1)
    other_next = tl.load(other_table + guessed, mask=guessed < limit, other=-2)
    alike = last == other_last
    on = next_page == other_next
    # The rows agree on the first `low` pages, and not on the first `high + 1`.
    low = tl.where(alike, tl.where(on, guessed + 1, guessed), 0)
    high = tl.where(alike, tl.where(on, limit, guessed), guessed - 1)
    known = alike & (on == 0)
    while tl.reduce(high - low, None, tl.standard._elementwise_max) > 0:
        searching = low < high
        middle = (low + high + 1) // 2
        page = tl.load(table + middle - 1, mask=searching, other=0)
        other_page = tl.load(other_table + middle - 1, mask=searching, other=0)
        low = tl.where(searching & (page == other_page), middle, low)
        high = tl.where(searching & (page != other_page), middle - 1, high)
    tl.store(guess_at, low, mask=is_pair & (low != guess))

    differ = low < limit
    page = tl.load(table + low, mask=differ & (known == 0), other=0)
    other_page = tl.load(other_table + low, mask=differ & (known == 0), other=0)
    later = tl.where(known, other_next < next_page, other_page < page)
    shorter = (other_pages < pages) | ((other_pages == pages) & (other < row))
    before = ((differ & later) | ((differ == 0) & shorter)) & is_other & (row != other)
    rank = tl.reduce(before.to(tl.int32), 1, tl.standard._sum_combine)
    common = tl.reduce(tl.where(before, low, 0), 1, tl.standard._elementwise_max)

    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(rank_ptr + rows, rank, mask=rows < batch)
    tl.store(common_ptr + rows, common * PAGE_SIZE, mask=rows < batch)
