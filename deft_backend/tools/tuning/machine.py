"""What `deft tune` measures on one device: launches of many equal groups, and whole batches."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from deft_backend.attention import TreeAttention
from deft_backend.costs import CostModel
from deft_backend.forest import PrefixForest, build_forest
from deft_backend.planner import Plan, PlanCapacity, plan_grouping
from deft_backend.planner.reference import plan_forest
from deft_backend.policies import GroupingBuilder, Segment, Target
from deft_backend.shapes import AttentionShape
from deft_backend.tools.traces.tree_forests import forest_from_levels

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


@dataclass(frozen=True)
class _Batch:
    forest: PrefixForest
    attention: TreeAttention
    table: torch.Tensor
    lens: torch.Tensor
    q: torch.Tensor
    out: torch.Tensor


class Trials:
    """Times of `auto`'s plans for whole batches, by the cost table that they were made with. Each
    plan runs as in a server's CUDA graph. Equal plans share one measurement, and batches with more
    KV than the machine holds are left out.
    """

    def __init__(self, machine: Machine, descriptions: Sequence[str]) -> None:
        self._machine = machine
        forests = {name: forest_from_levels(name) for name in descriptions}
        self._batches = {
            name: self._batch(forest)
            for name, forest in forests.items()
            if _pages(forest, machine.shape.page_size) <= len(machine.pages)
        }
        self._times: dict[tuple[str, str], float] = {}

    @property
    def names(self) -> list[str]:
        return list(self._batches)

    @property
    def plans(self) -> int:
        return len(self._times)

    def times_us(self, model: CostModel) -> dict[str, float]:
        return {name: self._time(name, batch, model) for name, batch in self._batches.items()}

    def _time(self, name: str, batch: _Batch, model: CostModel) -> float:
        attention, forest = batch.attention, batch.forest
        target = replace(attention.target, cost_model=model)
        plan, _ = plan_forest(forest, attention.policy, target, attention.capacity)
        key = name, _digest(plan)
        if key not in self._times:
            attention.use(plan, forest)
            self._times[key] = self._machine.clock(self._launch(batch))
        return self._times[key]

    def _launch(self, batch: _Batch) -> Callable[[], torch.Tensor]:
        k_cache, v_cache = self._machine.kv
        return lambda: batch.attention.run(
            batch.q, k_cache, v_cache, batch.table, batch.lens, out=batch.out, static_launch=True
        )

    def _batch(self, forest: PrefixForest) -> _Batch:
        machine = self._machine
        table = machine.pages[torch.from_numpy(_page_table(forest, machine.shape.page_size))]
        q = machine.queries(forest.batch_size)
        lens = torch.from_numpy(forest.seq_lens.astype(np.int32)).to(table.device)
        attention = machine.attention(forest.batch_size)
        return _Batch(forest, attention, table, lens, q, torch.empty_like(q))


def _pages(forest: PrefixForest, page_size: int) -> int:
    return int((-(-forest.length // page_size) + 1).sum())


def _page_table(forest: PrefixForest, page_size: int) -> npt.NDArray[np.int64]:
    """[B, P] int64: pages of each request; nodes that meet in a page: the later one's."""
    width = -(-int(forest.seq_lens.max()) // page_size)
    table = np.zeros((forest.batch_size, width), dtype=np.int64)
    used = 0
    for start, length, begin, end in zip(
        forest.start, forest.length, forest.query_begin, forest.query_end, strict=True
    ):
        first, last = start // page_size, -(-(start + length) // page_size)
        table[forest.order[begin:end], first:last] = np.arange(used, used + last - first)
        used += int(last - first)
    return table


def _digest(plan: Plan) -> str:
    digest = hashlib.sha256()
    for name, value in vars(plan).items():
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    return digest.hexdigest()
