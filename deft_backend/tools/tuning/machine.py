"""Launches of many equal groups on one device, which every fit of `deft tune` measures."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from deft_backend.attention import TreeAttention
from deft_backend.forest import build_forest
from deft_backend.planner import PlanCapacity, plan_grouping
from deft_backend.policies import GroupingBuilder, Segment, Target
from deft_backend.shapes import AttentionShape

Launch = Callable[[], torch.Tensor]
Clock = Callable[[Launch], float]  # microseconds that a launch takes

_MOST_CACHE_BYTES = 4 << 30
_CACHE_SHARE_OF_FREE = 4
_RESIDENT_SHARE_OF_L2 = 4
_ROW_PAGES = 16


@dataclass(frozen=True)
class Work:
    groups: int  # Groups; a multiple of `parts`
    # Queries and KV tokens of each group.
    queries: int
    tokens: int
    # Groups of each query. With 1, the query needs no merge; with more, the groups are chunks of
    # its context.
    parts: int = 1
    # Whether all groups read the same few KV tokens, which stay in the L2 cache; if not, every
    # group has its own KV.
    resident: bool = False

    @property
    def results(self) -> int:
        return self.groups * self.queries if self.parts > 1 else 0


class Machine:
    """One device, one shape of attention, and a KV cache to read; `clock` times a launch."""

    def __init__(self, shape: AttentionShape, clock: Clock) -> None:
        self.shape, self.clock = shape, clock
        self.target: Target = self.attention(1, PlanCapacity(1, 1, 1, 1)).target
        device, page_size, num_kv_heads = shape.device, shape.page_size, shape.num_kv_heads
        self.num_sms = 1
        free, cache_l2 = _MOST_CACHE_BYTES >> 8, 1 << 16  # enough for a trial on a CPU
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self.num_sms = properties.multi_processor_count
            cache_l2 = properties.L2_cache_size
            free = torch.cuda.mem_get_info(device)[0]
        page_bytes = 2 * page_size * num_kv_heads * shape.head_dim * shape.kv_dtype.itemsize
        pages = max(2, min(_MOST_CACHE_BYTES, free // _CACHE_SHARE_OF_FREE) // page_bytes)
        self._resident_pages = max(1, cache_l2 // _RESIDENT_SHARE_OF_L2 // page_bytes)
        cache = (pages, page_size, num_kv_heads, shape.head_dim)
        self.kv = [
            torch.randn(cache, device=device, dtype=shape.dtype).to(shape.kv_dtype)
            for _ in range(2)
        ]
        # Random order, as in a server's pool after some time.
        self.pages = torch.randperm(pages, device=device, dtype=torch.int32)

    def time_us(self, work: Work) -> float:
        return self.clock(self.launch(work))

    def launch(self, work: Work) -> Launch:
        device, contexts = self.shape.device, work.groups // work.parts
        batch, length = contexts * work.queries, work.parts * work.tokens
        builder = GroupingBuilder()
        for context in range(contexts):
            first = context * work.queries
            for part in range(work.parts):
                begin = part * work.tokens
                builder.add(
                    range(first, first + work.queries),
                    [Segment(first, begin, begin + work.tokens, False, 0, work.queries)],
                )
        entries = work.groups * work.queries
        capacity = PlanCapacity(batch, 2 * work.groups, entries, 2 * work.groups)
        attention = self.attention(batch, capacity)
        shared = np.where(np.arange(1, batch) % work.queries > 0, length, 0)
        forest = build_forest(np.arange(batch), shared, np.full(batch, length))
        attention.use(plan_grouping(builder.build(), forest, attention.target), forest)

        pages = -(-length // self.shape.page_size)
        held = min(len(self.pages), self._resident_pages) if work.resident else len(self.pages)
        # A row length in multiples of 16, as in a server: Triton compiles kernels for this
        # property.
        width = -(-pages // _ROW_PAGES) * _ROW_PAGES
        at = torch.arange(contexts, device=device)[:, None] * pages
        table = self.pages[(at + torch.arange(width, device=device)) % held]
        rows = torch.arange(contexts, dtype=torch.int32, device=device)
        rows = rows.repeat_interleave(work.queries)
        lens = torch.full((batch,), length, dtype=torch.int32, device=device)
        q = self.queries(batch)
        out = torch.empty_like(q)
        k_cache, v_cache = self.kv
        return lambda: attention.run(q, k_cache, v_cache, table, lens, table_rows=rows, out=out)

    def queries(self, batch: int) -> torch.Tensor:
        size = batch, self.shape.num_query_heads, self.shape.head_dim
        return torch.randn(size, device=self.shape.device, dtype=self.shape.dtype)

    def attention(self, max_batch: int, capacity: PlanCapacity | None = None) -> TreeAttention:
        return TreeAttention(**vars(self.shape), max_batch=max_batch, capacity=capacity)
