"""Compile everything before the first request, so that no request waits for a compiler."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations

import torch

from deft_backend.attention import TreeAttention
from deft_backend.forest import build_forest, warm_up
from deft_backend.planner import Plan, plan_grouping
from deft_backend.planner.on_device import SIZES
from deft_backend.policies import GroupingBuilder, Segment


def warm_up_attention(
    attention: TreeAttention,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table_columns: int,
    *,
    table_dtype: torch.dtype = torch.int32,
    index_dtype: torch.dtype = torch.int64,
    on_device: bool = False,
) -> None:
    """Run the planner, and the kernels in every combination that a plan may launch.

    Each launch is compiled for whether another launch precedes it. So every set of tile shapes
    runs, with and without a reduction. All requests hold only the first page of the KV cache.

    Parameters
    ----------
    attention : TreeAttention
    k_cache, v_cache : [pages, page_size, Hkv, D], or [slots, Hkv, D] when the page size is 1
        The KV cache of any layer; all layers must have the same strides.
    table_columns : int
        Columns of the host's page table.
    table_dtype, index_dtype : torch.dtype
        Of the host's page table, and of its table rows and lengths.
    on_device : bool
        Whether the device planner makes the plans. Then its kernels run for every batch size that
        they are compiled for, and the attention kernels run in the sets that its plans use. If a
        small tile holds a whole request, a batch of one request uses no large tiles. On the CPU the
        interpreter runs the kernels and compiles nothing: one small batch shows that they run.
    """
    device = attention.device
    table = torch.zeros((1, max(2, table_columns)), dtype=table_dtype, device=device)

    def run(batch: int, static_launch: bool) -> None:
        rows = torch.zeros(batch, dtype=index_dtype, device=device)
        lens = torch.full((batch,), 2, dtype=index_dtype, device=device)
        if static_launch:
            attention.plan_on_device(table, lens, table_rows=rows)
        shape = (batch, attention.num_query_heads, attention.head_dim)
        q = torch.zeros(shape, dtype=attention.dtype, device=device)
        attention.run(
            q, k_cache, v_cache, table, lens, table_rows=rows, static_launch=static_launch
        )

    if on_device:
        largest = attention.capacity.max_batch
        sizes = {min(largest, 4)} if device.type == "cpu" else {1, *SIZES, largest}
        for batch in sorted(sizes):
            if batch <= largest:
                run(batch, static_launch=True)
    else:
        warm_up()
        batch = min(attention.capacity.max_batch, 4)
        attention.plan(build_forest(range(batch), [1] * (batch - 1), [2] * batch))
        for plan, queries in (*plans_of_all_shapes(attention), *plans_of_many(attention)):
            attention.use(plan, build_forest(range(queries), [0] * (queries - 1), [2] * queries))
            run(queries, static_launch=False)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def plans_of_all_shapes(attention: TreeAttention) -> Iterator[tuple[Plan, int]]:
    """A plan and its batch size for every set of tile shapes, without and with a reduction.

    Sets that no batch of the attention's size and policy reaches are left out.
    """
    target, largest = attention.target, attention.capacity.max_batch
    queries = []  # of a group that runs in each tile shape
    below = 0
    for held, ranges in zip(target.tile_queries, target.tile_segments, strict=True):
        if ranges > 1:
            queries.append(1 if attention.policy.several_segments else 0)
        else:
            queries.append(below + 1 if held > below else 0)
            below = max(below, held)
    reached = [shape for shape, needed in enumerate(queries) if 0 < needed <= largest]
    for shapes in _subsets(reached):
        batch = sum(queries[shape] for shape in shapes)
        if batch > largest:
            continue
        forest = build_forest(range(batch), [0] * (batch - 1), [2] * batch)
        for repeats in (1, 2):  # two items a query: stage 2 merges them
            builder = GroupingBuilder()
            first = 0
            for shape in shapes:
                rows = list(range(first, first + queries[shape]))
                token = Segment(first, 0, 1, False, 0, len(rows))
                several = target.tile_segments[shape] > 1
                for _ in range(repeats):
                    builder.add(rows, [token, token] if several else [token])
                first += len(rows)
            yield plan_grouping(builder.build(), forest, target), batch


def plans_of_many(attention: TreeAttention) -> Iterator[tuple[Plan, int]]:
    """A plan of the smallest batch that stage 2 merges with its configuration for many queries."""
    batch = attention.few_queries + 1
    if batch > attention.capacity.max_batch:
        return
    forest = build_forest(range(batch), [0] * (batch - 1), [2] * batch)
    builder = GroupingBuilder()
    for row in range(batch):
        for _ in range(2):
            builder.add([row], [Segment(row, 0, 1, False, 0, 1)])
    yield plan_grouping(builder.build(), forest, attention.target), batch


def _subsets(shapes: list[int]) -> Iterable[tuple[int, ...]]:
    for count in range(1, len(shapes) + 1):
        yield from combinations(shapes, count)
