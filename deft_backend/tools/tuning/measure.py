"""`deft tune`: measure the cost table of one head shape on this machine's GPU. The costs in use are
varied one at a time as long as whole batches get faster plans."""

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton

from deft_backend.attention import TreeAttention
from deft_backend.costs import CostModel
from deft_backend.costs.tables import TableKey
from deft_backend.files.provenance import provenance
from deft_backend.forest import PrefixForest
from deft_backend.planner import Plan
from deft_backend.planner.reference import plan_forest
from deft_backend.shapes import AttentionShape
from deft_backend.tools.traces.tree_forests import forest_from_levels

Launch = Callable[[], torch.Tensor]
Clock = Callable[[Launch], float]  # microseconds that a launch takes

_MOST_CACHE_BYTES = 4 << 30
_CACHE_SHARE_OF_FREE = 4

_LAUNCH_MS = 20  # for which a launch is repeated
_WARMUP_MS = 10

_READ_BYTES = 4 << 30

UNSHARED = ("1 1024", "1 8192", "4 32768", "8 8192", "32 2048", "64 2048", "128 512", "256 1024")
"""Batches that share nothing: requests, then tokens of each."""

SHARED = (
    "1,10 4000,400",
    "1,32 4000,1",
    "1,256 4000,1",
    "1,10,10 1000,200,100",
    "1,256 256,32",
    "1,16,64 1024,256,32",
    "1,4,16,512 1024,256,128,32",
    "1,8 120000,512",
    "1,64 16384,64",
    "1,128 4096,64",
    "1,6,48 2000,8000,200",
    "1,16,32,64,128,1024 256,128,64,16,16,16",
    "1,2,4,8,16,32,64,128,1024 16,16,16,16,16,16,16,16,16",
)
"""Trees of the papers and of servers: nodes a level, then tokens of each node."""

FACTORS = (0.5, 0.7, 1.45, 2.0)  # each cost is tried at these multiples of its present value

LEAST_GAIN = 0.001  # A change that gains less than this share of the time may be noise


class Tuned(NamedTuple):
    model: CostModel
    ratio: float  # Geometric mean of the times over those of the costs before; at most 1
    plans: int  # Different plans that were measured
    batches: int  # Batches that each table was compared on


def captured(launch: Launch) -> tuple[Callable[[], None], torch.Tensor]:
    """A CUDA graph of a launch, as in a server, and the tensor that its replays write."""
    launch()  # compile the kernels, allocate memory
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch()
    return graph.replay, out


def median_ms(work: Callable[[], object], warmup: int = 25, rep: int = 100) -> float:
    """Median GPU milliseconds; the L2 cache is flushed before each repetition."""
    time: float = triton.testing.do_bench(work, warmup=warmup, rep=rep, return_mode="median")
    return time


def launch_us(launch: Callable[[], object], rep_ms: int) -> float:
    return 1e3 * median_ms(launch, _WARMUP_MS, rep_ms)


def read_gb_s() -> float:
    """Bytes that a large reduction or a copy reads, in 1e9 per second."""
    large = torch.zeros(_READ_BYTES // 4, dtype=torch.float32, device="cuda")
    # Of two reductions, the faster one is closer to the memory's bandwidth.
    read_ms = min(median_ms(lambda: large.sum()), median_ms(lambda: large.amax()), copy_ms(large))
    return _READ_BYTES / read_ms / 1e6


def copy_ms(large: torch.Tensor) -> float:
    """Milliseconds of a copy from one half of a tensor into the other."""
    half = len(large) // 2
    return median_ms(lambda: large[:half].copy_(large[half:]))


def gpu_clock(launch: Launch) -> float:
    """Median microseconds of a launch in a CUDA graph, with the L2 cache flushed before it."""
    replay, _ = captured(launch)
    return launch_us(replay, _LAUNCH_MS)


def tune(key: TableKey, before: CostModel, say: Callable[[str], None]) -> Tuned:
    """Search the table of `key` on the current CUDA device; `before` stays if it is as fast."""
    kv_dtype: torch.dtype = getattr(torch, key.dtype)
    # The time does not depend on which 16 bits the queries have.
    dtype = torch.bfloat16 if kv_dtype.itemsize == 1 else kv_dtype
    device = torch.device("cuda", torch.cuda.current_device())
    shape = AttentionShape(
        key.query_heads, key.kv_heads, key.head_dim, dtype, kv_dtype, device, key.page_size
    )
    say("memory bandwidth")
    bandwidth = float(np.round(read_gb_s()))
    # Costs that only the papers' policies read stay those of the table in use.
    kept = replace(before, source=source_of(key), head_dim=key.head_dim)
    say("plans of whole batches")
    return search(Trials(shape, gpu_clock, UNSHARED + SHARED), kept, bandwidth)


def source_of(key: TableKey) -> str:
    origin = provenance()
    return (
        f"deft tune on {origin['device']}, {key.shape}; torch {key.torch}, triton {key.triton}, "
        f"deft-backend {key.package} ({origin['commit']}), {origin['date']}"
    )


class _Batch(NamedTuple):
    forest: PrefixForest
    attention: TreeAttention
    launch: Launch


class Trials:
    """Times of `auto`'s plans for whole batches, by the cost table that they were made with. Each
    plan runs as in a server's CUDA graph. Equal plans share one measurement, and batches with more
    KV than the device holds are left out.
    """

    def __init__(self, shape: AttentionShape, clock: Clock, descriptions: Sequence[str]) -> None:
        self._shape, self._clock = shape, clock
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
        self._pages = torch.randperm(pages, device=device, dtype=torch.int32)
        forests = {name: forest_from_levels(name) for name in descriptions}
        self._batches = {
            name: self._batch(forest)
            for name, forest in forests.items()
            if int((-(-forest.length // page_size) + 1).sum()) <= pages
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
            self._times[key] = self._clock(batch.launch)
        return self._times[key]

    def _batch(self, forest: PrefixForest) -> _Batch:
        shape, batch = self._shape, forest.batch_size
        table = self._pages[torch.from_numpy(_page_table(forest, shape.page_size))]
        lens = torch.from_numpy(forest.seq_lens.astype(np.int32)).to(table.device)
        heads = batch, shape.num_query_heads, shape.head_dim
        q = torch.randn(heads, device=shape.device, dtype=shape.dtype)
        attention, out = TreeAttention(**vars(shape), max_batch=batch), torch.empty_like(q)
        k_cache, v_cache = self.kv

        def launch() -> torch.Tensor:
            return attention.run(q, k_cache, v_cache, table, lens, out=out, static_launch=True)

        return _Batch(forest, attention, launch)


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


def search(trials: Trials, before: CostModel, bandwidth_gb_s: float) -> Tuned:
    """The costs with the shortest times: from `before` on, with its bandwidth or the measured one,
    one cost at a time. They change only if plans are faster by :data:`LEAST_GAIN` in the geometric
    mean.
    """
    times = trials.times_us(before)
    best, ratio, improved = before, 1.0, True
    while improved:
        improved = False
        for model in _neighbours(best, bandwidth_gb_s):
            measured = mean_ratio(trials.times_us(model), times)
            if measured < ratio - LEAST_GAIN:
                best, ratio, improved = model, measured, True
    return Tuned(best, ratio, trials.plans, len(trials.names))


def _neighbours(model: CostModel, bandwidth_gb_s: float) -> Iterator[CostModel]:
    yield replace(model, bandwidth_gb_s=bandwidth_gb_s)
    tiles = model.tiles
    for factor in FACTORS:
        for shape in range(len(tiles.item_ns)):
            item_ns = _scaled(tiles.item_ns, shape, factor)
            yield replace(model, tiles=replace(tiles, item_ns=item_ns))
            token_ns = _scaled(tiles.token_ns, shape, factor)
            yield replace(model, tiles=replace(tiles, token_ns=token_ns))
        yield replace(model, tiles=replace(tiles, partial_ns=tiles.partial_ns * factor))
        yield replace(model, tiles=replace(tiles, reduce_ns=tiles.reduce_ns * factor))


def _scaled(values: tuple[float, ...], at: int, factor: float) -> tuple[float, ...]:
    return (*values[:at], values[at] * factor, *values[at + 1 :])


def mean_ratio(new: dict[str, float], old: dict[str, float]) -> float:
    return math.exp(sum(math.log(new[name] / old[name]) for name in old) / len(old))
