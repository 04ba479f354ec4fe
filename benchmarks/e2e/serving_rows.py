"""Rows: the figures of one workload on one backend, their files, and merging of files.

A file is a JSON list of rows, with its header in a second file. Runs with other backends or cases
add to the same file, because a machine may not be available for long enough to run everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypedDict, cast

from benchmarks import row_files
from benchmarks.row_files import RowsError

SAME = ("device", "driver", "versions", "commit")
"""Header fields that must agree between runs in one file."""


class Row(TypedDict):
    """One workload on one backend. Times are in milliseconds; None: not measured.

    ``tpot_ms`` is the time per output token. ``itl_p50_ms`` and ``itl_p99_ms`` are the gaps between
    tokens that a client sees. ``detail`` holds what only this workload has. ``error`` says why
    there are no figures. ``options`` are the host's options. ``tp`` is the number of GPUs that
    share the model's layers; older files lack it, and then it is 1. ``policy`` is the plugin's, if
    the run named one; older files lack it.
    """

    workload: str
    prefix: int | None
    branches: int | None
    suffix: int | None
    gen: int | None
    host: str
    backend: str
    model: str
    options: str
    tp: int
    policy: str | None
    tpot_ms: float | None
    ttft_ms: float | None
    ttft_p99_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    tokens_per_s: float | None
    error: str | None
    detail: dict[str, Any]


def make_row(
    workload: str,
    host: str,
    backend: str,
    model: str,
    options: str,
    *,
    prefix: int | None = None,
    branches: int | None = None,
    suffix: int | None = None,
    gen: int | None = None,
    tp: int = 1,
) -> Row:
    """A row without figures."""
    return Row(
        workload=workload, prefix=prefix, branches=branches, suffix=suffix, gen=gen, host=host,
        backend=backend, model=model, options=options, tp=tp, policy=None, tpot_ms=None,
        ttft_ms=None, ttft_p99_ms=None, itl_p50_ms=None, itl_p99_ms=None, tokens_per_s=None,
        error=None, detail={},
    )  # fmt: skip


def case_of(row: Row) -> tuple[object, ...]:
    """The fields that rows must share to be compared with each other."""
    return (
        row["host"], row["workload"], row["prefix"], row["branches"], row["suffix"], row["gen"],
        row["model"], row["options"], row["tp"],
    )  # fmt: skip


def case_name(row: Row) -> str:
    """The case in words."""
    gpus = f" on {row['tp']} GPUs" if row["tp"] > 1 else ""
    if row["prefix"] is None:
        return f"{row['workload']}{gpus}"
    return f"{row['workload']} {row['prefix']:,} × {row['branches']} × {row['suffix']:,}{gpus}"


def side_of(row: Row) -> str:
    """The row's backend, with the policy if the run named one."""
    return row["backend"] if row["policy"] is None else f"{row['backend']}, {row['policy']}"


def by_case(rows: Iterable[Row]) -> dict[tuple[object, ...], dict[str, Row]]:
    """Rows by case and :func:`side_of`, in their order."""
    found: dict[tuple[object, ...], dict[str, Row]] = {}
    for row in rows:
        found.setdefault(case_of(row), {})[side_of(row)] = row
    return found


def replaced(rows: Sequence[Row], new: Iterable[Row]) -> list[Row]:
    """The rows with new rows added; a new row replaces the earlier one of its case and side."""
    found = {(case_of(row), side_of(row)): row for row in rows}
    for row in new:
        found[case_of(row), side_of(row)] = row
    return list(found.values())


def read_rows(path: Path) -> tuple[list[Row], dict[str, Any]]:
    """Rows and header of a file; raises RowsError if the file holds something else."""
    wanted = Row.__required_keys__ - {"tp", "policy"}
    rows, header = row_files.read_rows(path, wanted, "python -m benchmarks e2e")
    for row in rows:
        row.setdefault("tp", 1)
        row.setdefault("policy", None)
    return cast(list[Row], rows), header


def joined(
    path: Path, rows: Sequence[Row], header: dict[str, Any], new: dict[str, Any], other: Path
) -> dict[str, Any]:
    """The common header of the rows of two runs.

    Raises
    ------
    RowsError
        If the runs have different devices, drivers, versions or commits.
    """
    for name in SAME:
        if rows and new.get(name) != header.get(name):
            raise RowsError(
                f"{path} was measured with {name} {header.get(name)}, {other} with "
                f"{new.get(name)}; rows of one file must come from one machine and build. Write "
                "to another file"
            )
    return {**new, "runs": [*header.get("runs", []), *new.get("runs", [])]}


def merged(files: Sequence[Path]) -> tuple[list[Row], dict[str, Any]]:
    """The rows of several files. Of a case that was measured twice, the last row counts."""
    if not files:
        raise RowsError("there are no files to merge")
    rows, header = read_rows(files[0])
    for path in files[1:]:
        others, new = read_rows(path)
        header = joined(files[0], rows, header, new, path)
        rows = replaced(rows, others)
    return rows, header
