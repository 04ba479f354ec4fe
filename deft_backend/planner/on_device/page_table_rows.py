"""Rows of the page table, as the first kernels of the device planner read them.

A query of the plan is a query block; `BLOCKS` of them belong to one request. A request's last
`private` tokens belong to no shared node: they are its query tokens, if it has several.
"""

from __future__ import annotations

import triton.language as tl
from triton import jit


@jit
def full_pages(
    query, there, tables, columns, private, BLOCKS: tl.constexpr, PAGE_SIZE: tl.constexpr
):
    """Full pages of queries, which alone can be shared, and at most the table's columns."""
    length = tl.load(tables.seq_lens + query // BLOCKS, mask=there, other=0).to(tl.int32)
    return tl.minimum(tl.maximum((length - private) // PAGE_SIZE, 0), columns)


@jit
def table_of(query, there, tables, stride_table, BLOCKS: tl.constexpr):
    """Where each query's row of the page table begins."""
    row = tl.load(tables.table_rows + query // BLOCKS, mask=there, other=0).to(tl.int64)
    return tables.page_table + row * stride_table
