"""Device planner, 1: how many requests come before each in depth-first order, and what it shares.

The order compares rows of the page table like words: the first page that differs decides, and a row
comes before the rows that continue it. So requests that share a prefix stand side by side. Of all
requests before a request, the one right before it shares the longest prefix with it.

Equality is monotone: the same page at a position means the same prefix. So a binary search finds
the first difference of two rows. The search starts where the two rows differed in the plan before.
From one step to the next hardly any pair changes. Two pages of each row prove that a pair did not.
A guess only saves halvings. So requests may come and go, and no guess is ever wrong.

Of two requests, one comes before the other. So each pair is compared once, for both of its
requests: programs take the tiles of the upper triangle of all pairs.
"""

from __future__ import annotations

import triton.language as tl
from triton import jit
from triton.language.extra.cuda import gdc_launch_dependents, globaltimer

from deft_backend.planner.on_device.arrays import Ranks, Tables
from deft_backend.planner.on_device.page_table_rows import full_pages, table_of


@jit
def _tile(TILE: tl.constexpr, ROW_TILES):
    """The program's tile of the upper triangle: index of its first request, and of its others.

    The last rows of tiles fill up the first, so that all rows of programs are equally long.
    """
    across, down = tl.program_id(0), tl.program_id(1)
    last = ROW_TILES - 1
    row = tl.where(across > down, down, last - down)
    column = tl.where(across > down, across - 1, last - across)
    return row * TILE, column * TILE


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
    TILE: tl.constexpr,
    BLOCKS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    TIMED: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Add to `Ranks`, which are zero: TILE queries and TILE others in each program.

    `columns` is the page table's width. guess [BATCH, BATCH] is `Scratch.guess`; any number from 0
    is a valid guess. The kernel replaces it by the pages that two requests have in common now.
    began [1] int64 gets the GPU's clock.
    """
    if TIMED:
        if (tl.program_id(0) == 0) & (tl.program_id(1) == 0):
            tl.store(began_ptr, globaltimer())
    if OVERLAPPED:
        gdc_launch_dependents()
    first_request, first_other = _tile(TILE, 2 * tl.num_programs(1))
    if first_other >= batch:
        return
    # The lanes of a warp take 4 requests and 8 others: their loads touch 12 rows instead of 33.
    request = 4 * tl.arange(0, TILE // 4)[:, None, None, None]
    request += first_request + tl.arange(0, 4)[None, None, :, None]
    other = 8 * tl.arange(0, TILE // 8)[None, :, None, None]
    other += first_other + tl.arange(0, 8)[None, None, None, :]
    is_request = request < batch
    is_other = other < batch
    is_pair = (request < other) & is_other
    pages = full_pages(request, is_request, tables, columns, private, BLOCKS, PAGE_SIZE)
    other_pages = full_pages(other, is_other, tables, columns, private, BLOCKS, PAGE_SIZE)
    table = table_of(request, is_request, tables, stride_table, BLOCKS)
    other_table = table_of(other, is_other, tables, stride_table, BLOCKS)
    limit = tl.where(is_pair, tl.minimum(pages, other_pages), 0)

    guess_at = guess_ptr + request * BATCH + other
    guess = tl.load(guess_at, mask=is_pair, other=0)
    guessed = tl.minimum(guess, limit)
    last = tl.load(table + guessed - 1, mask=guessed > 0, other=-1)
    other_last = tl.load(other_table + guessed - 1, mask=guessed > 0, other=-1)
    # Most guesses of a batch that shares little are 0: one load of a row serves all of them.
    first_page = tl.load(table, mask=pages > 0, other=-1)
    other_first = tl.load(other_table, mask=other_pages > 0, other=-1)
    is_inside = (guessed > 0) & (guessed < limit)
    next_page = tl.load(table + guessed, mask=is_inside, other=-1)
    other_next = tl.load(other_table + guessed, mask=is_inside, other=-1)
    next_page = tl.where(guessed > 0, next_page, first_page)
    other_next = tl.where(guessed > 0, other_next, other_first)
    alike = last == other_last
    on = (next_page == other_next) & (guessed < limit)
    known = alike & (on == 0)
    # The rows agree on the first `low` pages, and not on the first `high + 1`.
    low = tl.where(alike, tl.where(on, guessed + 1, guessed), 0)
    later = other_next < next_page
    if tl.reduce((known == 0).to(tl.int32), None, tl.standard._elementwise_max) > 0:
        high = tl.where(alike, tl.where(on, limit, guessed), guessed - 1)
        while tl.reduce(high - low, None, tl.standard._elementwise_max) > 0:
            searching = low < high
            middle = (low + high + 1) // 2
            page = tl.load(table + middle - 1, mask=searching, other=0)
            other_page = tl.load(other_table + middle - 1, mask=searching, other=0)
            low = tl.where(searching & (page == other_page), middle, low)
            high = tl.where(searching & (page != other_page), middle - 1, high)
        unknown = (low < limit) & (known == 0)
        page = tl.load(table + low, mask=unknown, other=0)
        other_page = tl.load(other_table + low, mask=unknown, other=0)
        later = tl.where(known, later, other_page < page)
        tl.store(guess_at, low, mask=is_pair & (low != guess))
    else:
        tl.store(guess_at, low, mask=is_pair & (low != guess))

    before = is_pair & tl.where(low < limit, later, other_pages < pages)
    behind = is_pair & (before == 0)
    _add_ranks(ranks, first_request, batch, before, low, 3, 1, TILE, PAGE_SIZE)
    _add_ranks(ranks, first_other, batch, behind, low, 0, 1, TILE, PAGE_SIZE)


@jit
def _add_ranks(
    ranks, first, batch, before, low, LAST: tl.constexpr, NEXT: tl.constexpr, TILE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """Count the requests before each of TILE requests, and what it shares with one of them."""
    count = tl.reduce(before.to(tl.int32), LAST, tl.standard._sum_combine)
    rank = tl.reshape(tl.reduce(count, NEXT, tl.standard._sum_combine), [TILE])
    shared = tl.reduce(tl.where(before, low, 0), LAST, tl.standard._elementwise_max)
    common = tl.reshape(tl.reduce(shared, NEXT, tl.standard._elementwise_max), [TILE])
    request = first + tl.arange(0, TILE)
    tl.atomic_add(ranks.rank + request, rank, mask=(request < batch) & (rank > 0), sem="relaxed")
    tl.atomic_max(
        ranks.common + request, common * PAGE_SIZE, mask=(request < batch) & (common > 0),
        sem="relaxed",
    )  # fmt: skip
