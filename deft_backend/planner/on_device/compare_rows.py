"""Device planner, 1: how many requests come before each in depth-first order, and what it shares.

The order compares rows of the page table like words: the first page that differs decides, and a row
comes before the rows that continue it. So requests that share a prefix stand side by side. Of all
requests before a request, the one right before it shares the longest prefix with it.

Equality is monotone: the same page at a position means the same prefix. So a binary search finds
the first difference of two rows. The search starts where the two rows differed in the plan before.
From one step to the next hardly any pair changes. Two pages of each row prove that a pair did not.
A guess only saves halvings. So requests may come and go, and no guess is ever wrong.
"""

from __future__ import annotations

import triton.language as tl
from triton import jit
from triton.language.extra.cuda import gdc_launch_dependents, globaltimer

from deft_backend.planner.on_device.arrays import Ranks, Tables
from deft_backend.planner.on_device.page_table_rows import full_pages, table_of


@jit(do_not_specialize=["batch", "columns", "stride_table", "private"])
def compare_rows(
    tables: Tables,
    ranks: Ranks,
    guess_ptr,
    began_ptr,
    batch,
    columns,
    stride_table,
    private,
    BATCH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TIMED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Write `Ranks`, BLOCK queries in each program.

    `columns` is the page table's width. guess [BATCH, BATCH] is `Scratch.guess`; any number from 0
    is a valid guess. The kernel replaces it by the pages that two requests have in common now.
    began [1] int64 gets the GPU's clock.
    """
    if TIMED:
        if tl.program_id(0) == 0:
            tl.store(began_ptr, globaltimer())
    if OVERLAPPED:
        gdc_launch_dependents()
    request = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    other = tl.arange(0, BATCH)[None, :]
    is_request = request < batch
    is_other = other < batch
    is_pair = is_request & is_other
    pages = full_pages(request, is_request, tables, columns, private, BLOCKS, PAGE_SIZE)
    other_pages = full_pages(other, is_other, tables, columns, private, BLOCKS, PAGE_SIZE)
    table = table_of(request, is_request, tables, stride_table, BLOCKS)
    other_table = table_of(other, is_other, tables, stride_table, BLOCKS)
    limit = tl.where(request == other, 0, tl.minimum(pages, other_pages))

    guess_at = guess_ptr + request * BATCH + other
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
    shorter = (other_pages < pages) | ((other_pages == pages) & (other < request))
    before = ((differ & later) | ((differ == 0) & shorter)) & is_other & (request != other)
    rank = tl.reduce(before.to(tl.int32), 1, tl.standard._sum_combine)
    common = tl.reduce(tl.where(before, low, 0), 1, tl.standard._elementwise_max)

    requests = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(ranks.rank + requests, rank, mask=requests < batch)
    tl.store(ranks.common + requests, common * PAGE_SIZE, mask=requests < batch)
