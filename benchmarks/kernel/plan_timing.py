"""Time of a plan on one CPU core, including its copy to the device."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from benchmarks.kernel.case_inputs import Inputs
from deft_backend import TreeAttention, forest_from_page_tables, forest_from_paths
from deft_backend.tools.tuning.launch_clock import Budget

_LEAST_PLANS, _MOST_PLANS = 5, 100


def plan_us(attention: TreeAttention, inputs: Inputs, budget: Budget) -> dict[str, float]:
    """Median microseconds on one CPU core, with the plan's copy to the device.

    Returns
    -------
    dict
        ``plan``: for a finished forest; ``page_tables``, ``paths``: with building the forest.
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
            torch.cuda.synchronize(device)  # do not count the copies of an earlier plan
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
    """Keep this thread on one core."""
    if not hasattr(os, "sched_setaffinity"):  # not on Linux
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(allowed)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, allowed)
