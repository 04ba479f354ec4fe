"""``python -m benchmarks planning``: time of a plan on the device, and of its attention.

The batches share 65,536 tokens through a tree of four levels, are beam searches, or share nothing.
Times are medians in microseconds of CUDA graphs, with the L2 cache flushed before each replay.
``kernels_us`` times each of the planner's kernels alone; inside a graph they overlap. ``error`` is
the largest difference to a plan in which each request reads all of its KV, over the largest output.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
import typer
from torch._C._autograd import DeviceType

from benchmarks.row_files import write_rows
from deft_backend import TreeAttention, forest_from_page_tables
from deft_backend.cli.errors import fail, reported
from deft_backend.files.provenance import provenance
from deft_backend.policies import PolicyError
from deft_backend.tools.tuning.launch_clock import Budget, captured, launch_us

FAN_OUTS = {64: (4, 4, 4), 256: (4, 8, 8), 1024: (8, 8, 16)}
"""Children of each node of the first three levels, by requests."""

PREFIX_TOKENS = 65536

OWN_TOKENS = 512
"""Most tokens of a request behind its prefix."""

UNSHARED = ((1, 65536), (32, 2048), (256, 4096), (2048, 256))
"""Requests, and tokens of each."""

BEAMS = tuple((width, prompt) for prompt in (4096, 16384) for width in (16, 64, 128, 256))
"""Widths of beam searches, and tokens of their prompts."""

BEAM_STEPS = 32
"""Steps since the prompt."""

HEADS = (32, 8, 128)
"""Query heads, KV heads and head dimension."""


@dataclass(frozen=True)
class Tables:
    """A batch's page tables on the CPU; unused entries are 0."""

    name: str
    page_table: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    page_size: int


def shared(requests: int, page_size: int, prefix_tokens: int = PREFIX_TOKENS) -> Tables:
    """Requests on a tree of three shared levels with `prefix_tokens` on each path, shuffled.

    A shared node takes 50 to 100 % of an even part of its path's remaining tokens, in whole pages.
    """
    draw = np.random.default_rng(0)
    levels = len(FAN_OUTS[requests])
    pages = 0
    rows: list[npt.NDArray[np.int32]] = [np.zeros(0, dtype=np.int32)]
    for lacking, children in zip(range(levels, 0, -1), (1, *FAN_OUTS[requests][:-1]), strict=True):
        below = []
        for above in (row for row in rows for _ in range(children)):
            even = (prefix_tokens - len(above) * page_size) / lacking
            part = even if lacking == 1 else even * draw.uniform(0.5, 1.0)
            held = max(1, int(part) // page_size)
            below.append(np.append(above, np.arange(pages, pages + held, dtype=np.int32)))
            pages += held
        rows = below
    rows = [row for row in rows for _ in range(FAN_OUTS[requests][-1])]
    own = draw.integers(1, OWN_TOKENS + 1, size=requests)
    table = np.zeros((requests, prefix_tokens // page_size + OWN_TOKENS), dtype=np.int32)
    lens = np.zeros(requests, dtype=np.int32)
    for at, row in zip(draw.permutation(requests), rows, strict=True):
        held = -(-int(own[at]) // page_size)
        table[at, : len(row)] = row
        table[at, len(row) : len(row) + held] = np.arange(pages, pages + held)
        lens[at] = len(row) * page_size + own[at]
        pages += held
    return Tables(f"{prefix_tokens} tokens in {levels + 1} levels", table, lens, page_size)


def beams(width: int, prompt: int, steps: int = BEAM_STEPS) -> Tables:
    """Rows of a beam search after some steps, with pages of one token.

    In each step, a beam continues one of the beams before it, as often as it is among the best. So
    the forest has many short levels, and most beams have a common ancestor of few steps ago.
    """
    draw = np.random.default_rng(width)
    table = np.zeros((width, prompt + steps), dtype=np.int32)
    table[:, :prompt] = np.arange(prompt)
    for step in range(prompt, prompt + steps):
        table = table[draw.integers(width, size=width)]
        table[:, step] = prompt + (step - prompt) * width + np.arange(width)
    lens = np.full(width, prompt + steps, dtype=np.int32)
    return Tables(f"{width} beams of {steps} steps on {prompt} tokens", table, lens, 1)


def unshared(requests: int, tokens: int, page_size: int) -> Tables:
    """Requests that share nothing."""
    pages = -(-tokens // page_size)
    table = np.arange(requests * pages, dtype=np.int32).reshape(requests, pages)
    lens = np.full(requests, tokens, dtype=np.int32)
    return Tables(f"{tokens} tokens, unshared", table, lens, page_size)


def measure(tables: Tables, policy: str, device: torch.device, budget: Budget) -> dict[str, Any]:
    """One row of the file."""
    query_heads, kv_heads, dim = HEADS
    batch = len(tables.seq_lens)
    generator = torch.Generator(device).manual_seed(batch)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float16)

    cache = (int(tables.page_table.max()) + 1, tables.page_size, kv_heads, dim)
    q, k_cache, v_cache = normal(batch, query_heads, dim), normal(*cache), normal(*cache)
    table = torch.from_numpy(tables.page_table).to(device)
    lens = torch.from_numpy(tables.seq_lens).to(device)
    forest = forest_from_page_tables(tables.page_table, tables.seq_lens, tables.page_size)

    def attention(policy: str) -> TreeAttention:
        return TreeAttention(
            num_query_heads=query_heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            dtype=torch.float16,
            device=device,
            page_size=tables.page_size,
            max_batch=batch,
            policy=policy,
        )

    def timed(tree: TreeAttention) -> tuple[float, torch.Tensor]:
        def run() -> torch.Tensor:
            return tree.run(q, k_cache, v_cache, table, lens, static_launch=True)

        replay, out = captured(run)
        time = launch_us(replay, budget)
        replay()
        return time, out

    on_device, on_host, alone = (attention(name) for name in (policy, policy, "flash-decoding"))

    def plan() -> torch.Tensor:
        on_device.plan_on_device(table, lens)
        return lens

    plan()
    torch.cuda.synchronize()
    replay, _ = captured(plan)
    plan_us = launch_us(replay, budget)
    kernels = kernel_times(replay)
    counted = on_device.device_planner.counters.tolist()
    replay()
    device_us, found = timed(on_device)
    on_host.plan(forest)
    host_us, _ = timed(on_host)
    alone.plan(forest)
    _, expected = timed(alone)
    error = float((found.double() - expected.double()).abs().max() / expected.abs().max())
    return {
        "workload": tables.name,
        "requests": batch,
        "page_size": tables.page_size,
        "plan_us": round(plan_us, 2),
        "kernels_us": kernels,
        "attention_us": {
            "device plan": round(device_us, 2),
            "reference's plan": round(host_us, 2),
        },
        "tokens_attended": counted[1] // counted[0],
        "tokens_loaded": counted[2] // counted[0],
        "error": error,
    }


def kernel_times(replay: Callable[[], None], repeats: int = 20) -> dict[str, float]:
    """Median microseconds of each kernel in a CUDA graph."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(repeats):
            replay()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in profile.events() or ():
        if event.device_type == DeviceType.CUDA:
            times[event.name].append(event.device_time_total)
    return {name: round(median(found), 2) for name, found in times.items()}


def planning(
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    policy: Annotated[str, typer.Option(help="Policy to plan with.")] = "auto",
    launch_ms: Annotated[
        int, typer.Option(help="Milliseconds that each figure is repeated for.", min=1)
    ] = 40,
    only: Annotated[
        str, typer.Option(help="Measure only batches whose name holds this, such as beams.")
    ] = "",
) -> None:
    """Time plans on this GPU: one row for each batch."""
    if not torch.cuda.is_available():
        raise fail("planning needs an NVIDIA GPU, and torch finds none")
    batches = [shared(requests, page) for page in (1, 16) for requests in FAN_OUTS]
    batches += [beams(width, prompt) for width, prompt in BEAMS]
    batches += [unshared(requests, tokens, 16) for requests, tokens in UNSHARED]
    rows = []
    for tables in batches:
        if only in tables.name:
            with reported(PolicyError):
                row = measure(tables, policy, torch.device("cuda"), Budget(launch_ms=launch_ms))
            rows.append(row)
            typer.echo(json.dumps(row))
            torch.cuda.empty_cache()
    header = {**provenance(), "policy": policy, "heads": "32/8", "head_dim": 128}
    write_rows(out, rows, header)
