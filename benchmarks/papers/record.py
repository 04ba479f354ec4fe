"""Measure a paper's table: every method on every workload, checked, and averaged over steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kernel.kernel_rows import Row
from benchmarks.kernel.measure_case import Setup, measure
from benchmarks.kernel.tree_workloads import cases_of
from benchmarks.papers.tables import Table
from benchmarks.papers.workloads import THOUGHTS, TOKEN_TREES, every_step
from benchmarks.row_files import write_rows
from deft_backend.files.provenance import driver, provenance


@dataclass(frozen=True)
class Kept:
    """Steps of one workload with one head shape."""

    workload: str
    heads: str
    rows: list[Row]

    def averaged(self) -> dict[str, Any]:
        """Means over the steps; a method that failed on any step has no time."""
        methods = list(self.rows[0]["us"])
        us = {name: [row["us"].get(name) for row in self.rows] for name in methods}
        return {
            "workload": self.workload,
            "heads": self.heads,
            "steps": len(self.rows),
            "batch": round(sum(row["batch"] for row in self.rows) / len(self.rows), 1),
            "share": round(
                sum(row["tokens_attended"] for row in self.rows)
                / max(1, sum(row["tokens_stored"] for row in self.rows)), 2,
            ),
            "us": {
                name: None if None in times else round(sum(times) / len(times), 2)  # type: ignore[arg-type]
                for name, times in us.items()
            },
            "error": {
                name: max((row["error"].get(name) or 0.0 for row in self.rows), default=None)
                for name in methods
            },
            "skipped": {name: why for row in self.rows for name, why in row["skipped"].items()},
        }  # fmt: skip


def record(
    table: Table, setup: Setup, traces: Path, path: Path, on_row: Callable[[dict[str, Any]], None]
) -> list[dict[str, Any]]:
    """Measure a table and write its rows after each workload."""
    came_from = provenance()
    header: dict[str, Any] = {
        **came_from,
        "driver": driver() if setup.device.type == "cuda" else None,
        "table": table.name, "place": table.place, "claim": table.claim,
        "dtype": setup.dtype, "planner": setup.ours.planner,
        "methods": {m.name: m.origin() for m in (setup.ours, *setup.peers)} | setup.unavailable,
    }  # fmt: skip
    rows: list[dict[str, Any]] = []
    cases = cases_of(table.workloads(traces), table.heads, None)
    steps: dict[tuple[str, str], list[Row]] = {}
    wanted: dict[tuple[str, str], int] = {}
    for case in cases:
        key = (case.workload.set, case.heads)
        wanted[key] = wanted.get(key, 0) + 1
    for row in measure(cases, setup):
        key = (row["set"], row["heads"])
        steps.setdefault(key, []).append(row)
        if len(steps[key]) == wanted[key]:
            rows.append(Kept(*key, steps.pop(key)).averaged())
            write_rows(path, rows, header)
            on_row(rows[-1])
    return rows


def ratios(rows: list[dict[str, Any]], to: str) -> dict[str, float]:
    """Geometric mean of each method's time over that of the method `to`, over common rows."""
    found: dict[str, list[float]] = {}
    for row in rows:
        base = row["us"].get(to)
        for name, us in row["us"].items():
            if base and us:
                found.setdefault(name, []).append(math.log(us / base))
    return {name: math.exp(sum(logs) / len(logs)) for name, logs in found.items()}


def counted_io(traces: Path, path: Path) -> list[dict[str, Any]]:
    """DeFT, Table 17: KV read over all steps of all recordings, query by query and shared.

    In tokens, because a token has the same bytes for both. ``node_std`` is the mean of the standard
    deviation of the nodes' lengths (Figure 13).
    """
    rows = []
    for name in (*THOUGHTS, *TOKEN_TREES):
        attended = stored = steps = 0
        spread = 0.0
        for forest in every_step(traces / f"{name}.json"):
            attended += forest.tokens_attended
            stored += forest.tokens_stored
            spread += float(np.std(forest.length))
            steps += 1
        rows.append({
            "workload": name, "steps": steps, "tokens_attended": attended, "tokens_stored": stored,
            "saved_percent": round(100 * (1 - stored / attended), 2),
            "node_std": round(spread / max(1, steps), 1),
        })  # fmt: skip
        write_rows(path, rows, {**provenance(), "table": "deft-io", "place": "DeFT, Table 17"})
    return rows
