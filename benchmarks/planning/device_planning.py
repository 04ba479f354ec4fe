"""``python -m benchmarks planning-device``: time of the device planner and of its plans' attention.

The batches are those of :mod:`benchmarks.planning.host_planning`, beam searches, and some that
share nothing.
Times are medians in microseconds of CUDA graphs, with the L2 cache flushed before each replay.
``kernels_us`` times each of the planner's kernels alone; inside a graph they overlap. ``error``
compares the attention's output with the output of a plan in which each request reads all of its KV.
It is the largest difference divided by the largest output.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch._C._autograd import DeviceType

from benchmarks.planning.host_planning import FAN_OUTS, PAGE_SIZES, PREFIX_TOKENS, ragged_batch
from benchmarks.row_files import write_rows
from deft_backend import TreeAttention, forest_from_page_tables
from deft_backend.files.provenance import provenance
from deft_backend.tools.tuning.launch_clock import Budget, captured, launch_us

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
    """Requests on a tree of four shared levels, shuffled."""
    batch = ragged_batch(FAN_OUTS[requests], page_size, True, prefix_tokens)
    table = np.maximum(batch.page_tables, 0)
    return Tables(f"{prefix_tokens} tokens in 4 levels", table, batch.seq_lens, page_size)


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
            num_query_heads=query_heads, num_kv_heads=kv_heads, head_dim=dim,
            dtype=torch.float16, device=device, page_size=tables.page_size, max_batch=batch,
            policy=policy,
        )  # fmt: skip

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
        "attention_us": {"device plan": round(device_us, 2), "host plan": round(host_us, 2)},
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


def measure_batches(
    out: Path,
    policy: str,
    launch_ms: int,
    only: str = "",
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
) -> None:
    """Time the device planner on batches with and without sharing, and write the rows.

    Parameters
    ----------
    out : Path
        JSON file to write.
    policy : str
        The policy to plan with.
    launch_ms : int
        Milliseconds of repetitions for each figure.
    only : str
        Measure only batches whose name holds this.
    on_row : callable
        Called with each row when it is measured.

    Raises
    ------
    PolicyError
        If the device planner does not know the policy.
    RowsError
        If `out` cannot be written.
    """
    device = torch.device("cuda")
    rows = []
    batches = [shared(requests, page) for page in PAGE_SIZES for requests in FAN_OUTS]
    batches += [beams(width, prompt) for width, prompt in BEAMS]
    batches += [unshared(requests, tokens, 16) for requests, tokens in UNSHARED]
    for tables in batches:
        if only not in tables.name:
            continue
        row = measure(tables, policy, device, Budget(launch_ms=launch_ms))
        rows.append(row)
        on_row(row)
        torch.cuda.empty_cache()
    header = {
        **provenance(),
        "policy": policy,
        "heads": "32/8",
        "head_dim": 128,
        "fan_outs": list(FAN_OUTS.values()),
    }
    write_rows(out, rows, header)
