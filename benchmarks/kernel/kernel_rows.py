"""Rows: the figures of one case, their files, and values that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

from benchmarks.kernel.methods import OURS
from deft_backend.tools.ab.result import MISSING


class Row(TypedDict):
    """One case.

    ``us`` and ``error`` map methods to microseconds and relative errors. A method without a correct
    result has no time; ``skipped`` says why. ``mask`` is "chain" or "tree", ``plan_us`` the time of
    a plan on the device, ``node_std`` the standard deviation of the nodes' lengths.
    """

    set: str
    workload: str
    heads: str
    head_dim: int
    dtype: str
    kv_dtype: str
    page_size: int
    layout: str
    batch: int
    query_tokens: int
    mask: str
    tokens_stored: int
    tokens_attended: int
    share: float
    node_std: float
    policy: str
    roof_us: float | None
    us: dict[str, float | None]
    error: dict[str, float | None]
    skipped: dict[str, str]
    facts: dict[str, dict[str, int]]
    repeatable: bool | None
    plan_us: float | None


def line_of(row: Row) -> str:
    """One case as a line of a log."""
    times = "  ".join(f"{name} {_shown(us, ',.1f')}" for name, us in row["us"].items())
    cache = f" KV cache {row['kv_dtype']}" if row["kv_dtype"] != row["dtype"] else ""
    return (
        f"{row['set']}  {row['workload']}  {row['heads']} page {row['page_size']}{cache}: "
        f"roof {_shown(row['roof_us'], ',.1f')}  {times}  error "
        f"{_shown(row['error'].get(OURS), '.1e')}"
    )


def _shown(value: float | None, form: str) -> str:
    return MISSING if value is None else format(value, form)


def averaged(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """A paper's table: means over the steps of each workload, tree attention under `auto`'s name.

    A method that failed on any step has no time.
    """
    steps: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        steps.setdefault((row["set"], row["heads"]), []).append(row)
    return [_mean_row(*key, of) for key, of in steps.items()]


def _mean_row(workload: str, heads: str, rows: Sequence[Row]) -> dict[str, Any]:
    named = {name: "auto" if name == OURS else name for name in rows[0]["us"]}
    us = {called: [row["us"].get(name) for row in rows] for name, called in named.items()}
    attended = sum(row["tokens_attended"] for row in rows)
    return {
        "workload": workload,
        "heads": heads,
        "steps": len(rows),
        "batch": round(sum(row["batch"] for row in rows) / len(rows), 1),
        "share": round(attended / max(1, sum(row["tokens_stored"] for row in rows)), 2),
        "node_std": round(sum(row["node_std"] for row in rows) / len(rows), 1),
        "us": {
            name: None if None in times else round(sum(filter(None, times)) / len(times), 2)
            for name, times in us.items()
        },
        "error": {
            called: max(row["error"].get(name) or 0.0 for row in rows)
            for name, called in named.items()
        },
        "skipped": {name: why for row in rows for name, why in row["skipped"].items()},
    }
