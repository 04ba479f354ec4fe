"""Rows: the figures of one workload on one backend, their files and tables.

Runs with other backends or cases add to the same file, because a machine may not be available for
long enough to run everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypedDict, cast

from rich.table import Table
from rich.text import Text

from benchmarks import row_files
from benchmarks.e2e.launch import HOSTS
from benchmarks.row_files import RowsError
from deft_backend.tools.ab.result import MISSING

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


FIGURES = ("tpot_ms", "ttft_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "tokens_per_s")


def make_row(workload: str, host: str, backend: str, model: str, options: str, **known: Any) -> Row:
    """A row without figures; `known` holds further fields."""
    row: dict[str, Any] = {"workload": workload}
    row |= dict.fromkeys(("prefix", "branches", "suffix", "gen"))
    row |= {"host": host, "backend": backend, "model": model, "options": options, "tp": 1}
    row |= {"policy": None, **dict.fromkeys(FIGURES), "error": None, "detail": {}, **known}
    return cast(Row, row)


def case_of(row: Row) -> tuple[object, ...]:
    """The fields that rows must share to be compared with each other."""
    names = ("host", "workload", "prefix", "branches", "suffix", "gen", "model", "options", "tp")
    return tuple(row[name] for name in names)  # type: ignore[literal-required]


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

    Raises RowsError if the runs have different devices, drivers, versions or commits.
    """
    for name in SAME:
        if rows and new.get(name) != header.get(name):
            raise RowsError(
                f"{path} was measured with {name} {header.get(name)}, {other} with "
                f"{new.get(name)}; rows of one file must come from one machine and build. Write "
                "to another file"
            )
    return {**new, "runs": [*header.get("runs", []), *new.get("runs", [])]}


def rows_table(rows: Sequence[Row]) -> Table:
    """One line per row, grouped by case, with the plugin's time divided by the row's."""
    table = Table(title="End to end, milliseconds", title_justify="left")
    table.add_column("workload")
    table.add_column("backend", no_wrap=True)
    for name in ("per token", "deft ÷ it", "TTFT", "TTFT p99", "gap p50", "gap p99", "tokens/s"):
        table.add_column(name, justify="right", no_wrap=True)
    for backends in by_case(rows).values():
        ours = backends.get(HOSTS[next(iter(backends.values()))["host"]].ours)
        for number, row in enumerate(backends.values()):
            name = case_name(row) if number == 0 else ""
            if row["error"]:
                said = Text(row["error"].splitlines()[0][:60], style="bold red")
                table.add_row(name, side_of(row), said)
                continue
            ratio = Text(MISSING)
            if ours is not None and ours is not row and ours["tpot_ms"] and row["tpot_ms"]:
                value = ours["tpot_ms"] / row["tpot_ms"]
                ratio = Text(f"{value:.3f}", style="green" if value <= 1 else "red")
            digits = dict(zip(FIGURES, (3, 1, 1, 2, 2, 1), strict=True))
            per_token, *others = (
                MISSING if (value := row[name]) is None else f"{value:,.{count}f}"  # type: ignore[literal-required]
                for name, count in digits.items()
            )
            table.add_row(name, side_of(row), per_token, ratio, *others)
    return table
