"""Clocks: GPU time of a launch with a cold L2 cache, host time of a plan on one core."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import triton

from deft_backend import TreeAttention, forest_from_page_tables, forest_from_paths
from deft_backend.bench.kernel.inputs import Inputs

_WARMUP_MS = 10
_LEAST_PLANS, _MOST_PLANS = 5, 100


@dataclass(frozen=True)
class Budget:
    """How long is measured: milliseconds of repetitions a launch, seconds a kind of plan."""

    launch_ms: int = 40
    plan_s: float = 0.1


QUICK = Budget(launch_ms=15, plan_s=0.03)


def captured(launch: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """A CUDA graph of a launch, as servers decode, and the tensor that its replays write."""
    launch()  # compile, build, allocate
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = launch()
    return graph.replay, out


def launch_us(launch: Callable[[], object], budget: Budget) -> float:
    """Median GPU microseconds of a launch; the L2 cache is flushed before each repetition."""
    time_ms: float = triton.testing.do_bench(
        launch, warmup=_WARMUP_MS, rep=budget.launch_ms, return_mode="median"
    )
    return time_ms * 1e3


def plan_us(attention: TreeAttention, inputs: Inputs, budget: Budget) -> dict[str, float]:
    """Median host microseconds on one core, the plan's way to the device included.

    Returns
    -------
    dict
        ``plan``: of a forest that is there; ``page_tables``, ``paths``: forest building included.
    """
    tables, forest = inputs.tables, inputs.forest
    paths = [
        [(node, int(forest.length[node])) for node in forest.path(position)[:-1]]
        for position in range(forest.batch_size)
    ]
    by_row = [paths[position] for position in _inverse(forest.order.tolist())]

    def from_tables() -> None:
        attention.plan(
            forest_from_page_tables(
                tables.page_table, tables.seq_lens, tables.page_size, check=False
            )
        )

    def from_paths() -> None:
        attention.plan(forest_from_paths(by_row, tables.seq_lens, tables.page_size))

    with _one_core():
        return {
            "plan": _host_us(lambda: attention.plan(forest), inputs.device, budget),
            "page_tables": _host_us(from_tables, inputs.device, budget),
            "paths": _host_us(from_paths, inputs.device, budget),
        }


def _host_us(work: Callable[[], object], device: torch.device, budget: Budget) -> float:
    work()
    times: list[float] = []
    end = time.perf_counter() + budget.plan_s
    while len(times) < _LEAST_PLANS or (len(times) < _MOST_PLANS and time.perf_counter() < end):
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # an earlier plan's copies are no part of this one
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def _inverse(order: list[int]) -> list[int]:
    position = [0] * len(order)
    for at, row in enumerate(order):
        position[row] = at
    return position


@contextmanager
def _one_core() -> Iterator[None]:
    """Keep this thread on one core of those it may run on."""
    if not hasattr(os, "sched_setaffinity"):  # not on Linux
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
