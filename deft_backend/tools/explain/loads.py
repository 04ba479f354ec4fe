"""Loads and stores of a plan, counted item by item as the kernels issue them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deft_backend.planner.encoding import DIRECT, OPEN_END, SPAN_SHIFT
from deft_backend.planner.plan import Plan
from deft_backend.policies.makespan import partial_result_bytes

SPAN_BYTES = 4
"""Bytes that a masked tile reads for each KV token on top of keys and values: its span."""


@dataclass(frozen=True)
class PlanLoads:
    """The loads and stores of one decode step, over all requested layers."""

    num_items: int  # (KV range, query tile) pairs
    # (item, query) pairs whose result waits in memory for a merge. A query's last item may merge
    # the other results itself; then its own result stays in registers.
    num_partials: int
    # KV that the items load.
    kv_tokens: int
    kv_bytes: int
    # Queries, once for each item, and outputs.
    query_bytes: int
    output_bytes: int
    # Spans, one for each token of an item of several ranges. A first range to which the whole tile
    # attends needs none.
    mask_bytes: int
    # Partial results.
    partial_bytes_written: int
    partial_bytes_read: int


def count_plan_loads(
    plan: Plan,
    seq_lens: Sequence[int] | npt.NDArray[np.integer],
    *,
    num_query_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype_bytes: int = 2,
    num_layers: int = 1,
) -> PlanLoads:
    """Count the loads and stores of stage 1 and stage 2, item by item.

    - `seq_lens` [B] int: Current tokens of each request; open ranges end there.
    - `num_query_heads`, `num_kv_heads`, `head_dim`, `dtype_bytes`, `num_layers`: Shape of the
      attention, bytes of an element, and layers to sum over.
    """
    lens = np.asarray(seq_lens, dtype=np.int64)
    end = np.where(plan.segment_end == OPEN_END, lens[plan.segment_request], plan.segment_end)
    tokens = np.maximum(0, end - plan.segment_start)
    queries = np.diff(plan.item_query_ptr)

    single = int(plan.tile_ptr[-2])  # items of several ranges come last
    first = plan.item_segment_ptr[single:-1]
    masked = np.arange(len(tokens)) >= plan.item_segment_ptr[single]
    masked[first[plan.segment_span[first] == queries[single:] << SPAN_SHIFT]] = False

    written = int((plan.entry_slot >= 0).sum())
    merging = plan.entry_slot < DIRECT
    # An item that merges is a small tile of one query. Items up to there have one segment each, so
    # its index is also its segment's.
    entry_item = np.repeat(np.arange(plan.num_items), queries)
    merged = int(plan.segment_span[entry_item[merging]].sum())
    outputs = int((plan.entry_slot < 0).sum()) + len(plan.reduce_query)

    query_vector = num_query_heads * head_dim * dtype_bytes * num_layers
    partial = partial_result_bytes(num_query_heads, head_dim, dtype_bytes) * num_layers
    kv_tokens = int(tokens.sum())
    return PlanLoads(
        num_items=plan.num_items,
        num_partials=written,
        kv_tokens=kv_tokens,
        kv_bytes=kv_tokens * 2 * head_dim * dtype_bytes * num_kv_heads * num_layers,
        query_bytes=len(plan.entry_query) * query_vector,
        output_bytes=outputs * query_vector,
        mask_bytes=int(tokens[masked].sum()) * SPAN_BYTES * num_kv_heads * num_layers,
        partial_bytes_written=written * partial,
        partial_bytes_read=(int(plan.reduce_ptr[-1]) + merged) * partial,
    )
