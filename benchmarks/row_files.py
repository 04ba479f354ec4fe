"""Files of rows: a JSON list, a line a row, and its header beside it; or both in one object."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from deft_backend.json_file import read_json


class RowsError(ValueError):
    """A file that holds no rows, or rows that do not belong together."""


def header_file(path: Path) -> Path:
    """Where the header of a file of rows is."""
    return path.with_suffix(".header.json")


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], header: Mapping[str, Any]) -> None:
    """Write rows and their header, each at once: a reader never sees half a file.

    Raises
    ------
    RowsError
        If they cannot be written.
    """
    lines = ",\n ".join(json.dumps(row, allow_nan=False) for row in rows)
    _replace(path, f"[{lines}]\n")
    _replace(header_file(path), json.dumps(header, indent=1) + "\n")


def write_object(path: Path, rows: Sequence[Mapping[str, Any]], header: Mapping[str, Any]) -> None:
    """Write ``{"header": …, "rows": […]}``, a line a row, at once; errors may be NaN.

    Raises
    ------
    RowsError
        If it cannot be written.
    """
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    head = json.dumps(header)
    _replace(path, f'{{"header": {head},\n "rows": [\n  {lines}\n]}}\n')


def read_rows(path: Path, keys: Collection[str], command: str) -> tuple[Any, dict[str, Any]]:
    """Rows and header of a file that :func:`write_rows` wrote.

    Parameters
    ----------
    path : Path
    keys : collection of str
        What every row has.
    command : str
        Whose rows they are, for the error.

    Raises
    ------
    RowsError
        If there is no such file, or it holds something else.
    """
    rows = read_json(path, RowsError)
    header = read_json(header_file(path), RowsError)
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and row.keys() >= set(keys) for row in rows
    ):
        raise RowsError(
            f"{path} does not hold rows of '{command}'; expected a list of objects with "
            f"{', '.join(sorted(keys))}"
        )
    if not isinstance(header, dict):
        raise RowsError(f"{header_file(path)} holds no object; expected the header of {path.name}")
    return rows, header


def make_folder(path: Path) -> None:
    """Make the folder that `path` goes to: before anything is measured, not after.

    Raises
    ------
    RowsError
        If it cannot be made.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RowsError(f"cannot write {path}: {error}") from error


def _replace(path: Path, text: str) -> None:
    make_folder(path)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        raise RowsError(f"cannot write {path}: {error}") from error
