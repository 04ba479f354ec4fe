"""Rows: what is recorded of a case, how it is written, and what follows from it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypedDict, cast

from deft_backend.bench.kernel.methods import OURS


class Row(TypedDict):
    """A case.

    ``us`` and ``error`` map methods to microseconds and relative errors; a method without a
    correct result has no time. ``skipped`` says why a method has none.
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
    plan_us: dict[str, float]
    facts: dict[str, dict[str, int]]
    repeatable: bool | None


class RowsError(ValueError):
    """A file that holds no rows, or rows that do not belong together."""


def key_of(row: Row) -> tuple[str, str, str, str, int, int, str, str]:
    """What tells a row from others."""
    return (
        row["set"], row["workload"], row["heads"], row["dtype"], row["head_dim"],
        row["page_size"], row["layout"], row["policy"],
    )  # fmt: skip


def best_peer(row: Row) -> tuple[str, float] | None:
    """The fastest peer with a correct result, and its microseconds."""
    times = [(us, name) for name, us in row["us"].items() if name != OURS and us is not None]
    return (min(times)[1], min(times)[0]) if times else None


def speed_up(row: Row) -> float | None:
    """How many times faster than the fastest correct peer."""
    peer, ours = best_peer(row), row["us"].get(OURS)
    return peer[1] / ours if peer and ours else None


def of_roof(row: Row, method: str = OURS) -> float | None:
    """The fraction of the roof that a method reaches."""
    us, roof = row["us"].get(method), row["roof_us"]
    return roof / us if us and roof else None


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Of the values that there are; None without any."""
    found = [math.log(value) for value in values if value]
    return math.exp(sum(found) / len(found)) if found else None


def header_file(path: Path) -> Path:
    """Where the header of a file of rows is."""
    return path.with_suffix(".header.json")


def write_rows(path: Path, rows: Sequence[Row], header: dict[str, Any]) -> None:
    """Write rows and their header, each at once: a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n ".join(json.dumps(row, allow_nan=False) for row in rows)
    _replace(path, f"[{lines}]\n" if rows else "[]\n")
    _replace(header_file(path), json.dumps(header, indent=1) + "\n")


def read_rows(path: Path) -> tuple[list[Row], dict[str, Any]]:
    """Rows and header of a file that :func:`write_rows` wrote.

    Raises
    ------
    RowsError
        If there is no such file, or it holds something else.
    """
    rows, header = _read(path), _read(header_file(path))
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and row.keys() >= Row.__required_keys__ for row in rows
    ):
        raise RowsError(
            f"{path} does not hold rows of 'deft bench kernel'; expected a list of objects with "
            f"{', '.join(sorted(Row.__required_keys__))}"
        )
    if not isinstance(header, dict):
        raise RowsError(f"{header_file(path)} holds no object; expected the header of {path.name}")
    return cast(list[Row], rows), header


def merged(
    parts: Sequence[tuple[Path, list[Row], dict[str, Any]]],
) -> tuple[list[Row], dict[str, Any]]:
    """Rows of several runs as one list; a case that was measured twice keeps its last row.

    Raises
    ------
    RowsError
        If the runs are of different devices, versions or commits.
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
        for row in rows:
            found[key_of(row)] = row
    runs = [run for _, _, other in parts for run in other.get("runs", [])]
    complete = all(other.get("complete", False) for _, _, other in parts)
    return list(found.values()), {**header, "complete": complete, "runs": runs}


def _replace(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RowsError(f"cannot read {path}: {error.strerror or error}") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RowsError(f"{path}: expected JSON; {error}") from error
