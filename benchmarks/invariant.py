"""``python -m benchmarks invariant``: bits of the policy `invariant`, and its time over `auto`'s.

Each request is computed alone. Then it comes in random batches: beside others, repeated, in any
order, beside requests that are shorter than before, from other pages under other ids, with a wider
page table, in CUDA graphs of several sizes and without one, by plans of the device and of the CPU.
Its output must have the same bits.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import typer

from benchmarks.e2e.command import typed_command
from benchmarks.kernel.batched_reference import batched_reference
from benchmarks.kernel.case_inputs import make_inputs
from benchmarks.kernel.command import make_setup
from benchmarks.kernel.measure_case import measure
from benchmarks.kernel.mixed_forests import mixed_forest
from benchmarks.kernel.sets import read_set
from benchmarks.kernel.tree_workloads import Case, Workload, cases_of, parse_heads
from benchmarks.row_files import driver, make_folder, write_rows
from deft_backend import TreeAttention, forest_from_page_tables
from deft_backend.attention.reference_attention import relative_error
from deft_backend.cli.errors import fail
from deft_backend.files.provenance import provenance
from deft_backend.tools.tuning.measure import captured

REQUESTS, SIZES = 54, (8, 64, 256)
"""Requests of the pool, and of the CUDA graphs."""

MOST_TOKENS = 1 << 15
"""More than the longest request of :func:`mixed_forest` has."""

EAGER, ON_CPU = 4, 8
"""One batch in so many is launched without a graph; one in so many is planned on the CPU."""


@dataclass(frozen=True)
class Shape:
    """An attention whose bits are compared."""

    name: str
    heads: str
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    query_tokens: int = 1
    logit_cap: float = 0.0
    has_sinks: bool = False


SHAPES = (
    Shape("bf16 32/8", "32/8"),
    Shape("fp16 32/32", "32/32", dtype=torch.float16),
    Shape("drafts 2 32/8", "32/8", query_tokens=2),
    Shape("fp8 sinks 32/8", "32/8", kv_dtype=torch.float8_e4m3fn, has_sinks=True),
    Shape("head dim 256 16/8", "16/8", head_dim=256, dtype=torch.float16),
    Shape("head dim 64 28/4", "28/4", head_dim=64),
    Shape("soft cap 32/16", "32/16", logit_cap=30.0),
)

TIMES = {"bf16 32/8": ("32/8", "bf16"), "fp16 32/32": ("32/32", "fp16")}
"""Heads and dtype of the timed shapes."""


class Batch(NamedTuple):
    """The inputs of a launch; in a CUDA graph, they are overwritten for the next batch."""

    q: torch.Tensor
    tables: torch.Tensor
    lens: torch.Tensor


class Pool:
    """Requests of a random forest, and the same KV in other pages."""

    def __init__(self, shape: Shape, device: torch.device, requests: int, seed: int) -> None:
        self.shape = shape
        forest = mixed_forest(seed, requests)
        workload = Workload("own", shape.name, lambda: forest)
        case = Case(workload, *parse_heads(shape.heads), 16)
        dtypes = shape.dtype, shape.kv_dtype
        inputs = make_inputs(case, shape.head_dim, *dtypes, device, seed=seed)
        draw = torch.Generator(device).manual_seed(seed)
        tokens, (_, heads, dim) = shape.query_tokens, inputs.q.shape
        self.q = torch.randn(
            (requests, tokens, heads, dim), generator=draw, device=device, dtype=shape.dtype
        )
        # A request must hold its query tokens.
        self.lens = inputs.seq_lens.clamp(min=tokens)
        names = torch.randperm(inputs.tables.num_pages, generator=draw, device=device)
        back = names.argsort()
        self.caches = (inputs.k_cache, inputs.v_cache)
        self.moved = tuple(_picked(cache, back) for cache in self.caches)
        self.tables = inputs.page_table
        self.moved_tables = names.to(torch.int32)[self.tables.long()]
        self.options: dict[str, Any] = {"logit_cap": shape.logit_cap}
        if shape.has_sinks:
            self.options["sinks"] = torch.linspace(-1.0, 3.0, heads, device=device)

    def attention(self, most: int, query_tokens: int | None = None) -> TreeAttention:
        query_heads, kv_heads = parse_heads(self.shape.heads)
        return TreeAttention(
            num_query_heads=query_heads,
            num_kv_heads=kv_heads,
            head_dim=self.shape.head_dim,
            dtype=self.shape.dtype,
            device=self.q.device,
            kv_dtype=self.shape.kv_dtype,
            page_size=16,
            max_batch=most,
            query_tokens=query_tokens or self.shape.query_tokens,
            policy="invariant",
            max_tokens=MOST_TOKENS,
        )

    def launch(
        self, attention: TreeAttention, batch: Batch, *, moved: bool, on_cpu: bool = False
    ) -> torch.Tensor:
        """The outputs of a batch, like its `q`."""
        keys, values = self.moved if moved else self.caches
        tokens = batch.q.shape[1]
        if on_cpu:
            tables, lens = batch.tables.cpu().numpy(), batch.lens.cpu().numpy()
            attention.plan(forest_from_page_tables(tables, lens, 16), query_tokens=tokens)
        else:
            attention.plan_batch(batch.tables, batch.lens, query_tokens=tokens, on_device=True)
        found = attention.run(
            batch.q.flatten(0, 1), keys, values, batch.tables, batch.lens, **self.options
        )
        return found.view_as(batch.q)

    def alone(self, attention: TreeAttention, tokens: slice = slice(None)) -> torch.Tensor:
        """The output of each request by itself; of each of these query tokens, in decode."""
        found = []
        for request in range(len(self.lens)):
            one = slice(request, request + 1)
            batch = Batch(self.q[one, tokens], self.tables[one], self.lens[one])
            found.append(self.launch(attention, batch, moved=False))
        return torch.cat(found)


def compare(
    shape: Shape, device: torch.device, seconds: float, requests: int, sizes: tuple[int, ...]
) -> dict[str, Any]:
    """The row of a shape."""
    pool = Pool(shape, device, requests, seed=1)
    random = np.random.default_rng(1)
    attention = pool.attention(max(sizes))
    expected = pool.alone(attention)
    row: dict[str, Any] = {"what": "bits", "shape": shape.name, "requests": 0, "batches": 0}
    row |= {"differ": 0, "error": 0.0, "differ_with_plans_of_the_cpu": 0}
    if shape.query_tokens == 1 and not pool.options["logit_cap"] and not shape.has_sinks:
        tensors = (*pool.caches, pool.tables, pool.lens)
        wanted = batched_reference(pool.q[:, 0], *tensors)
        row["error"] = float(f"{relative_error(expected[:, 0], wanted):.2g}")
    graphs = {
        (size, moved): Graph(pool, attention, size, moved=moved)
        for size in sizes
        for moved in (False, True)
    }
    end = time.monotonic() + seconds
    while not row["batches"] or time.monotonic() < end:
        size, moved = int(random.choice(sizes)), bool(random.integers(2))
        chosen = torch.from_numpy(random.integers(requests, size=random.integers(1, size + 1)))
        whole = torch.from_numpy(random.random(len(chosen)) < 0.8).to(device)
        chosen = chosen.to(device)
        shorter = torch.from_numpy(random.random(len(chosen))).to(device) * pool.lens[chosen]
        lens = torch.where(
            whole, pool.lens[chosen], shorter.to(torch.int32).clamp(min=shape.query_tokens)
        )
        tables = (pool.moved_tables if moved else pool.tables)[chosen]
        batch = Batch(pool.q[chosen], tables, lens)
        on_cpu = row["batches"] % ON_CPU == 0
        if on_cpu or row["batches"] % EAGER == 0:
            found = pool.launch(attention, batch, moved=moved, on_cpu=on_cpu)
        else:
            found = graphs[size, moved](batch)
        same = (found == expected[chosen]).flatten(1).all(1)
        differ = int((whole & ~same).sum())
        row["differ_with_plans_of_the_cpu" if on_cpu else "differ"] += differ
        row["requests"] += int(whole.sum())
        row["batches"] += 1
    if shape.query_tokens > 1:
        row["query_tokens_with_the_bits_of_decode"] = _as_decode(pool, expected)
    return row


class Graph:
    """A CUDA graph of a plan and its attention, with a wide page table; on the CPU, the launch."""

    def __init__(self, pool: Pool, attention: TreeAttention, size: int, *, moved: bool) -> None:
        width, spare = pool.tables.shape[1], 5
        self._held = Batch(
            pool.q.new_zeros(size, *pool.q.shape[1:]),
            pool.tables.new_zeros(size, width + spare),
            pool.lens.new_zeros(size),
        )

        def launch() -> torch.Tensor:
            return pool.launch(attention, self._held, moved=moved)

        self._replay: Callable[[], torch.Tensor | None] = launch
        self._out = self._held.q
        if pool.q.is_cuda:
            self._replay, self._out = captured(launch)

    def __call__(self, batch: Batch) -> torch.Tensor:
        count, width = batch.tables.shape
        self._held.q[:count], self._held.tables[:count, :width] = batch.q, batch.tables
        self._held.lens.zero_()
        self._held.lens[:count] = batch.lens
        found = self._replay()
        return (self._out if found is None else found)[:count]


def _as_decode(pool: Pool, expected: torch.Tensor) -> tuple[int, int]:
    """Query tokens of drafts with the bits of decode at their positions, and all of them."""
    attention, lens = pool.attention(1, query_tokens=1), pool.lens
    same = 0
    for token in range(pool.shape.query_tokens):
        pool.lens = lens - (pool.shape.query_tokens - 1 - token)
        found = pool.alone(attention, slice(token, token + 1))
        same += int((found[:, 0] == expected[:, token]).flatten(1).all(1).sum())
    pool.lens = lens
    return same, len(lens) * pool.shape.query_tokens


def _picked(cache: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """The cache's pages in another order; there is no such operation in 8 bits."""
    return cache.view(torch.uint8)[pages].view(cache.dtype)


def times(shape: str, device: torch.device) -> Iterator[dict[str, Any]]:
    """`invariant` and `auto` on the papers' trees and on servers' batches; plans of the CPU."""
    heads, dtype = TIMES[shape]
    words = [f"heads={heads}", f"dtype={dtype}", "policy=invariant", "planner=host", "peers=auto"]
    for name in ("fasttree", "deft", "servers"):
        spec, workloads = read_set(name, None, words)
        setup = make_setup(spec, device, quick=False)
        for row in measure(cases_of(workloads, [parse_heads(heads)], spec.page_size), setup):
            ours, auto = row["us"]["deft"], row["us"]["auto"]
            if ours is None or auto is None:
                raise fail(f"{row['workload']}: {row['skipped']}")
            over = {"auto_us": round(auto, 1), "invariant_over_auto": round(ours / auto, 3)}
            yield {"what": "times", "shape": shape, "tree": row["workload"], **over}


def invariant(
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    seconds: Annotated[float, typer.Option(min=0.1, help="Seconds of batches.")] = 60.0,
) -> None:
    """Compare the bits of requests alone and in random batches, and time the policy `invariant`.

    Each shape has a process on the same GPU; times are measured after them. Exits with 1 if a bit
    differs.
    """
    if not torch.cuda.is_available():
        raise fail("invariant needs an NVIDIA GPU, and torch finds none")
    device = torch.device("cuda", torch.cuda.current_device())
    rows: list[dict[str, Any]] = []
    make_folder(out)
    header = {**provenance(), "driver": driver(), "command": typed_command()}
    check = partial(compare, device=device, seconds=seconds, requests=REQUESTS, sizes=SIZES)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(SHAPES), mp_context=spawn) as processes:
        for row in processes.map(check, SHAPES):
            rows.append(row)
            typer.echo(str(row))
            write_rows(out, rows, header)
    for name in TIMES:
        for row in times(name, device):
            rows.append(row)
            write_rows(out, rows, header)
    wrong = sum(row["differ"] + row["differ_with_plans_of_the_cpu"] for row in rows[: len(SHAPES)])
    raise typer.Exit(wrong > 0)
