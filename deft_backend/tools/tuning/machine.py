"""What `deft tune` measures on one device: the plans of whole batches."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from deft_backend.attention import TreeAttention
from deft_backend.costs import CostModel
from deft_backend.forest import PrefixForest
from deft_backend.planner import Plan
from deft_backend.planner.reference import plan_forest
from deft_backend.shapes import AttentionShape
from deft_backend.tools.traces.tree_forests import forest_from_levels

Launch = Callable[[], torch.Tensor]
Clock = Callable[[Launch], float]  # microseconds that a launch takes

_MOST_CACHE_BYTES = 4 << 30
_CACHE_SHARE_OF_FREE = 4


class Machine:
    """One device, one shape of attention, and a KV cache to read; `clock` times a launch."""

    def __init__(self, shape: AttentionShape, clock: Clock) -> None:
        self.shape, self.clock = shape, clock
        device, page_size, num_kv_heads = shape.device, shape.page_size, shape.num_kv_heads
        free = _MOST_CACHE_BYTES >> 8  # enough for a trial on a CPU
        if device.type == "cuda":
            free = torch.cuda.mem_get_info(device)[0]
        page_bytes = 2 * page_size * num_kv_heads * shape.head_dim * shape.kv_dtype.itemsize
        pages = max(2, min(_MOST_CACHE_BYTES, free // _CACHE_SHARE_OF_FREE) // page_bytes)
        cache = (pages, page_size, num_kv_heads, shape.head_dim)
        self.kv = [
            torch.randn(cache, device=device, dtype=shape.dtype).to(shape.kv_dtype)
            for _ in range(2)
        ]
        # Random order, as in a server's pool after some time.
        self.pages = torch.randperm(pages, device=device, dtype=torch.int32)

    def queries(self, batch: int) -> torch.Tensor:
        size = batch, self.shape.num_query_heads, self.shape.head_dim
        return torch.randn(size, device=self.shape.device, dtype=self.shape.dtype)

    def attention(self, max_batch: int) -> TreeAttention:
        return TreeAttention(**vars(self.shape), max_batch=max_batch)


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
