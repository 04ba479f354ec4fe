"""Device planner, 1 to 3: the depth-first order of the batch, what neighbours share, and its nodes.

The order compares rows of the page table like words: the first page that differs decides, and a row
comes before the rows that continue it. So requests that share a prefix stand side by side. Of all
requests before a request, the one right before it shares the longest prefix with it.

Equality is monotone: the same page at a position means the same prefix. So a binary search finds
the first difference of two rows. The search starts where the two rows differed in the plan before.
From one step to the next hardly any pair changes. Two pages of each row prove that a pair did not.
A guess only saves halvings. So requests may come and go, and no guess is ever wrong.

Of two requests, one comes before the other. So ``compare_rows`` compares each pair once, for both
of its requests: programs take the tiles of the upper triangle of all pairs.

A query of the plan is a query block; `BLOCKS` of them belong to one request. A request's last
`private` tokens belong to no shared node: they are its query tokens, if it has several.
"""

from __future__ import annotations

import triton.language as tl
from triton import jit
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait, globaltimer

from deft_backend.planner.on_device.arrays import Nodes, Ranks, Tables
from deft_backend.planner.on_device.tiles import overlap, shared_chunks, tiles_of


@jit
def length_of(query, there, tables, BLOCKS):
    return tl.load(tables.seq_lens + query // BLOCKS, mask=there, other=0).to(tl.int32)


@jit
def full_pages(query, there, tables, columns, private, BLOCKS, PAGE_SIZE):
    """Full pages of queries, which alone can be shared, and at most the table's columns."""
    length = length_of(query, there, tables, BLOCKS)
    return tl.minimum(tl.maximum((length - private) // PAGE_SIZE, 0), columns)


@jit
def table_of(query, there, tables, stride_table, BLOCKS):
    """Where each query's row of the page table begins."""
    row = tl.load(tables.table_rows + query // BLOCKS, mask=there, other=0).to(tl.int64)
    return tables.page_table + row * stride_table


@jit
def _tile(TILE, ROW_TILES):
    """The program's tile of the upper triangle: index of its first request, and of its others. The
    last rows of tiles fill up the first, so that all rows of programs are equally long.
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
def _add_ranks(ranks, first, batch, before, low, LAST, NEXT, TILE, PAGE_SIZE):
    """Count the requests before each of TILE requests, and what it shares with one of them."""
    count = tl.reduce(before.to(tl.int32), LAST, tl.standard._sum_combine)
    rank = tl.reshape(tl.reduce(count, NEXT, tl.standard._sum_combine), [TILE])
    shared = tl.reduce(tl.where(before, low, 0), LAST, tl.standard._elementwise_max)
    common = tl.reshape(tl.reduce(shared, NEXT, tl.standard._elementwise_max), [TILE])
    request = first + tl.arange(0, TILE)
    tl.atomic_add(ranks.rank + request, rank, mask=(request < batch) & (rank > 0), sem="relaxed")
    shares = (request < batch) & (common > 0)
    tl.atomic_max(ranks.common + request, common * PAGE_SIZE, mask=shares, sem="relaxed")


@jit(do_not_specialize=["batch", "columns", "stride_table", "private", "short_tokens"])
def sort_rows(
    tables: Tables,
    ranks: Ranks,
    order_ptr,
    cut_ptr,
    below_ptr,
    batch,
    columns,
    stride_table,
    private,
    short_tokens,
    BATCH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CHUNKS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Write `Scratch.order` and `Nodes.cut`, BLOCK queries in each program.

    A host may hold one prefix in two places and hand out pages of both. Then equality is not
    monotone, and ranks may collide. So this kernel makes a permutation of any ranks. It also checks
    what neighbours share: the last page before the cut must be the same in both. By the rule
    ``absolute`` they share whole chunks only.

    The kernel also sets `Nodes.below` to zero, into which ``find_nodes`` counts.
    """
    if OVERLAPPED:
        gdc_launch_dependents()
    requests = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_request = requests < batch
    other = tl.arange(0, BATCH)[None, :]
    pages = full_pages(requests, is_request, tables, columns, private, BLOCKS, PAGE_SIZE)
    table = table_of(requests, is_request, tables, stride_table, BLOCKS)
    if OVERLAPPED:
        gdc_wait()

    rank = tl.load(ranks.rank + requests, mask=is_request, other=0)
    other_rank = tl.load(ranks.rank + other, mask=other < batch, other=0)
    key = rank * BATCH + requests
    other_key = other_rank * BATCH + other
    before = (other < batch) & (other_key < key[:, None])
    place = tl.reduce(before.to(tl.int32), 1, tl.standard._sum_combine)
    last = tl.reduce(tl.where(before, other_key, -1), 1, tl.standard._elementwise_max)
    neighbour = tl.maximum(last, 0) % BATCH

    shared = tl.load(ranks.common + requests, mask=is_request, other=0) // PAGE_SIZE
    full = full_pages(neighbour, is_request, tables, columns, private, BLOCKS, PAGE_SIZE)
    there = is_request & (last >= 0) & (shared > 0) & (shared <= pages) & (shared <= full)
    other_table = table_of(neighbour, is_request, tables, stride_table, BLOCKS)
    page = tl.load(table + shared - 1, mask=there, other=-1)
    other_page = tl.load(other_table + shared - 1, mask=there, other=-2)
    cut = tl.where(there & (page == other_page), shared * PAGE_SIZE, 0)
    if CHUNKS == "absolute":
        length = length_of(requests, is_request, tables, BLOCKS)
        other_length = length_of(neighbour, is_request, tables, BLOCKS)
        cut = shared_chunks(cut, length, other_length, short_tokens)

    none = tl.full([BLOCK], 0, tl.int32)
    tl.store(order_ptr + place, requests, mask=is_request)
    tl.store(cut_ptr + place, cut, mask=is_request)
    tl.store(cut_ptr + batch + requests, none, mask=requests == 0)
    tl.store(below_ptr + requests, none, mask=is_request)
    tl.store(below_ptr + BATCH + requests, none, mask=is_request)


@jit(do_not_specialize=["batch", "small_tile", "large_tile"])
def find_nodes(
    first_ptr,
    nodes: Nodes,
    ranks: Ranks,
    batch,
    small_tile,
    large_tile,
    BATCH: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Write `Nodes`, BLOCK places in each program.

    A cut is the number of tokens that two neighbours share. A node ends at a cut. Its queries reach
    from the nearest smaller cut on the left to the nearest smaller cut on the right. Its tokens
    begin at the larger of these two. If several cuts belong to one node, the leftmost cut leads. A
    leaf, the request's own tokens, begins at the larger of the cuts on both sides. Every cut looks
    at every other cut, because a batch has few.

    Tiles hold `small_tile` and `large_tile` queries. The kernel also sets `Ranks` to zero for the
    next plan.
    """
    overlap(OVERLAPPED)
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = places[:, None]
    other = tl.arange(0, BATCH)[None, :]
    is_place = places < batch
    none = tl.full([BLOCK], 0, tl.int32)
    tl.store(ranks.rank + places, none, mask=is_place)
    tl.store(ranks.common + places, none, mask=is_place)
    cut = tl.load(nodes.cut + places, mask=is_place, other=0)
    behind = tl.load(nodes.cut + places + 1, mask=is_place, other=0)
    other_cut = tl.load(nodes.cut + other, mask=other < batch, other=0)
    other_behind = tl.load(nodes.cut + other + 1, mask=other < batch, other=0)

    # Nearest smaller cuts. The edges of the batch, before 0 and at `batch`, share nothing.
    first = none
    leader = none
    stop = none
    parent = none
    leaves = none
    if tl.reduce(cut, 0, tl.standard._elementwise_max) > 0:
        smaller = other_cut < cut[:, None]
        left = smaller & (other < place)
        first = tl.reduce(tl.where(left, other, 0), 1, tl.standard._elementwise_max)
        of_node = (other_cut == cut[:, None]) & (other > first[:, None]) & (other <= place)
        leader = tl.reduce(tl.where(of_node, other, BATCH), 1, tl.standard._elementwise_min)
    leads = is_place & (cut > 0) & (leader == places)
    if tl.reduce(leads.to(tl.int32), 0, tl.standard._elementwise_max) > 0:
        right = (other_cut < cut[:, None]) & (other > place) & (other < batch)
        stop = tl.reduce(tl.where(right, other, batch), 1, tl.standard._elementwise_min)
        # The node above ends at the larger of these two cuts. The right one leads, because every
        # cut back to `first` is larger. The left one has its leader to its left.
        start = tl.load(nodes.cut + first, mask=leads, other=0)
        start_right = tl.load(nodes.cut + stop, mask=leads, other=0)
        lower = (other_cut < start[:, None]) & (other < first[:, None])
        edge = tl.reduce(tl.where(lower, other, 0), 1, tl.standard._elementwise_max)
        of_above = (other_cut == start[:, None]) & (other > edge[:, None])
        of_above = of_above & (other <= first[:, None])
        above = tl.reduce(tl.where(of_above, other, BATCH), 1, tl.standard._elementwise_min)
        parent = tl.where(start_right > start, stop, tl.where(start > 0, above, 0))
        own_leaf = (tl.maximum(other_cut, other_behind) == cut[:, None]) & (other < batch)
        own_leaf = own_leaf & (other >= first[:, None]) & (other < stop[:, None])
        leaves = tl.reduce(own_leaf.to(tl.int32), 1, tl.standard._sum_combine)
    queries = tl.where(leads, stop - first, 0)
    leaf_parent = tl.where(behind > cut, places + 1, tl.where(cut > 0, leader, 0))

    tl.store(first_ptr + places, first, mask=is_place)
    tl.store(nodes.queries + places, queries, mask=is_place)
    tl.store(nodes.parent + places, tl.where(leads, parent, 0), mask=is_place)
    tl.store(nodes.leaves + places, tl.where(leads, leaves, 0), mask=is_place)
    tl.store(nodes.leaf_parent + places, leaf_parent, mask=is_place)
    is_large, tiles = tiles_of(queries, small_tile, large_tile)
    counter = nodes.below + is_large.to(tl.int32) * BATCH + parent
    tl.atomic_add(counter, tiles, mask=leads & (parent > 0))
