"""Rows: the figures of one case, their files, and values that follow from them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypedDict, cast

from benchmarks import row_files
from benchmarks.kernel.methods import OURS
from benchmarks.row_files import RowsError
from deft_backend.tools.ab.result import MISSING


class _EveryRow(TypedDict):
    """One case.

    ``us`` and ``error`` map methods to microseconds and relative errors. A method without a correct
    result has no time; ``skipped`` says why.
    """

    set: str
    workload: str
    heads: str
    head_dim: int
    dtype: str
    page_size: int
    layout: str
    batch: int
    tokens_stored: int
    tokens_attended: int
    share: float
    policy: str
    roof_us: float | None
    us: dict[str, float | None]
    error: dict[str, float | None]
    skipped: dict[str, str]
    facts: dict[str, dict[str, int]]
    repeatable: bool | None


class Row(_EveryRow, total=False):
    """One case; in old files, its last fields are missing.

    ``query_tokens`` is then 1, ``mask`` "chain" (or "tree"), and ``kv_dtype`` the row's dtype.
    ``plan_us`` is the time of a plan on the device, ``node_std`` the standard deviation of the
    nodes' lengths.
    """

    query_tokens: int
    mask: str
    kv_dtype: str
    plan_us: float | None
    node_std: float


def key_of(row: Row) -> tuple[object, ...]:
    """The fields that identify a row."""
    names = ("set", "workload", "heads", "dtype", "head_dim", "page_size", "layout", "policy")
    return (kv_dtype(row), *(row[name] for name in names))  # type: ignore[literal-required]


def kv_dtype(row: Row) -> str:
    """The dtype of the KV cache."""
    return row.get("kv_dtype", row["dtype"])


def line_of(row: Row) -> str:
    """One case as a line of a log."""
    times = "  ".join(f"{name} {_shown(us, ',.1f')}" for name, us in row["us"].items())
    cache = f" KV cache {kv_dtype(row)}" if kv_dtype(row) != row["dtype"] else ""
    return (
        f"{row['set']}  {row['workload']}  {row['heads']} page {row['page_size']}{cache}: "
        f"roof {_shown(row['roof_us'], ',.1f')}  {times}  error "
        f"{_shown(row['error'].get(OURS), '.1e')}"
    )


def _shown(value: float | None, form: str) -> str:
    return MISSING if value is None else format(value, form)


def read_rows(path: Path) -> tuple[list[Row], dict[str, Any]]:
    """Rows and header of a file; raises RowsError if the file holds something else."""
    rows, header = row_files.read_rows(path, Row.__required_keys__, "python -m benchmarks kernel")
    return cast(list[Row], rows), header


def _planners(header: dict[str, Any]) -> set[str]:
    """The planners of deft in the runs of a file."""
    return {run.get("options", {}).get("planner", "host") for run in header.get("runs", [{}])}


def merged(
    parts: Sequence[tuple[Path, list[Row], dict[str, Any]]],
) -> tuple[list[Row], dict[str, Any]]:
    """The rows of several runs. Of a case that was measured twice, the last row counts.

    Raises
    ------
    RowsError
        If the runs have different devices, versions, commits or planners.
    """
    if not parts:
        raise RowsError("there are no files to merge")
    first, _, header = parts[0]
    found: dict[tuple[object, ...], Row] = {}
    for path, rows, other in parts:
        for name in ("device", "versions", "commit"):
            if other.get(name) != header.get(name):
                raise RowsError(
                    f"{path} was measured with {name} {other.get(name)}, {first} with "
                    f"{header.get(name)}; rows of one file must come from one machine and build"
                )
        theirs, ours = (", ".join(sorted(_planners(of))) for of in (other, header))
        if theirs != ours:
            raise RowsError(
                f"{path} was measured with --planner {theirs}, {first} with {ours}; rows of one "
                "file must have one"
            )
        for row in rows:
            found[key_of(row)] = row
    runs = [run for _, _, other in parts for run in other.get("runs", [])]
    complete = all(other.get("complete", False) for _, _, other in parts)
    return list(found.values()), {**header, "complete": complete, "runs": runs}


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
        "node_std": round(sum(row.get("node_std", 0.0) for row in rows) / len(rows), 1),
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
