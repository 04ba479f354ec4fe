"""Device planner, 2: the depth-first order of the batch, and what neighbours in it share.

A host may hold one prefix in two places and hand out pages of both. Then equality is not monotone,
and ranks may collide. So this kernel makes a permutation of any ranks. It also checks what
neighbours share: the last page before the cut must be the same in both.
"""

from __future__ import annotations

import triton.language as tl
from triton import jit
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deft_backend.planner.on_device.arrays import Ranks, Tables
from deft_backend.planner.on_device.page_table_rows import full_pages, table_of


@jit(do_not_specialize=["batch", "columns", "stride_table", "private"])
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
    BATCH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Write `Scratch.order` and `Nodes.cut`, BLOCK queries in each program.

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

    none = tl.full([BLOCK], 0, tl.int32)
    tl.store(order_ptr + place, requests, mask=is_request)
    tl.store(cut_ptr + place, cut, mask=is_request)
    tl.store(cut_ptr + batch + requests, none, mask=requests == 0)
    tl.store(below_ptr + requests, none, mask=is_request)
    tl.store(below_ptr + BATCH + requests, none, mask=is_request)
