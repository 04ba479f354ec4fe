"""Loads and stores of a plan, counted from its own items, as the kernels walk them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deft_backend.planner.plan import DIRECT, OPEN_END, Plan


@dataclass(frozen=True)
class PlanLoads:
    """What the kernels move for one decode step, over all layers asked for.

    Fields are those of :class:`~deft_backend.explain.Explanation` of the same names; `kv_bytes`
    here is what the items issue.
    """

    num_items: int
    kv_tokens: int
    kv_bytes: int
    query_bytes: int
    output_bytes: int
    mask_bytes: int
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
    """Walk a plan item by item and count what stage 1 and stage 2 load and store.

    It shares no arithmetic with :func:`~deft_backend.explain.explain`; each checks the other.

    Parameters
    ----------
    plan : Plan
    seq_lens : [B] int
        Current tokens of each batch row; open ranges end there.
    num_query_heads, num_kv_heads, head_dim, dtype_bytes, num_layers : int
        Shape of the attention, bytes of an element, and layers to sum over.
    """
    kv_tokens = queries = direct = partials = mask_words = 0
    for item in range(plan.num_items):
        first, stop = int(plan.item_query_ptr[item]), int(plan.item_query_ptr[item + 1])
        queries += stop - first
        for entry in range(first, stop):
            if plan.entry_slot[entry] == DIRECT:
                direct += 1
            else:
                partials += 1
        for s in range(int(plan.item_segment_ptr[item]), int(plan.item_segment_ptr[item + 1])):
            end = int(plan.segment_end[s])
            if end == OPEN_END:
                end = int(seq_lens[int(plan.segment_row[s])])
            tokens = max(0, end - int(plan.segment_start[s]))
            kv_tokens += tokens
            if plan.segment_mask[s] >= 0:
                mask_words += tokens * -(-(stop - first) // 64)

    reduced = sum(
        int(plan.reduce_ptr[r + 1]) - int(plan.reduce_ptr[r]) for r in range(len(plan.reduce_query))
    )
    query_vector = num_query_heads * head_dim * dtype_bytes * num_layers
    partial = num_query_heads * (head_dim + 1) * 4 * num_layers
    return PlanLoads(
        num_items=plan.num_items,
        kv_tokens=kv_tokens,
        kv_bytes=kv_tokens * 2 * head_dim * dtype_bytes * num_kv_heads * num_layers,
        query_bytes=queries * query_vector,
        output_bytes=(direct + len(plan.reduce_query)) * query_vector,
        mask_bytes=mask_words * 8 * num_kv_heads * num_layers,
        partial_bytes_written=partials * partial,
        partial_bytes_read=reduced * partial,
    )
