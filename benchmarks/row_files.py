"""Files of rows: one JSON object with a header, and one line for each row."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from deft_backend.files.private_files import parsed


class RowsError(ValueError):
    """The file has no rows, or its rows do not belong together."""


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], header: Mapping[str, Any]) -> None:
    """Write ``{"header": …, "rows": […]}`` with one line per row; errors may be NaN.

    The file is replaced at once, so readers never see half of it. Raises RowsError if it cannot be
    written.
    """
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    head = json.dumps(header)
    _replace(path, f'{{"header": {head},\n "rows": [\n  {lines}\n]}}\n')


def read_rows(path: Path, keys: Collection[str], command: str) -> tuple[Any, dict[str, Any]]:
    """The rows and header that :func:`write_rows` wrote.

    - `keys`: keys of every row.
    - `command`: the command that writes such rows, for the error.

    Raises RowsError if there is no such file, or the file holds something else.
    """
    content = read_json(path, RowsError)
    rows = content.get("rows") if isinstance(content, dict) else None
    if (
        not isinstance(rows, list)
        or not isinstance(content.get("header"), dict)
        or not all(isinstance(row, dict) and row.keys() >= set(keys) for row in rows)
    ):
        raise RowsError(
            f"{path} does not hold rows of '{command}'; expected an object with a header, and a "
            f"list of rows with {', '.join(sorted(keys))}"
        )
    return rows, content["header"]


def make_folder(path: Path) -> None:
    """Make the folder of `path`; call it before anything is measured.

    Raises RowsError if the folder cannot be made, or `path` itself is a folder.
    """
    if path.is_dir():
        raise RowsError(f"cannot write {path}: it is a folder; expected a file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RowsError(f"cannot write {path}: {error}") from error


def _replace(path: Path, text: str) -> None:
    make_folder(path)
    part = path.with_name(f"{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise RowsError(f"cannot write {path}: {error}") from error
    finally:
        part.unlink(missing_ok=True)


def read_json(path: Path, error: type[Exception], what: str = "") -> Any:
    try:
        return parsed(path.read_text(encoding="utf-8"))
    except OSError as cause:
        raise error(f"cannot read {what}{path}: {cause.strerror or cause}") from cause
    except ValueError as cause:
        raise error(f"{path}: expected JSON; {cause}") from cause


def driver() -> str | None:
    """Version of the NVIDIA driver."""
    try:
        return (
            subprocess.run(
                ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
                capture_output=True,
                text=True,
                check=True,
                timeout=30,
            )
            .stdout.splitlines()[0]
            .strip()
        )
    except (OSError, subprocess.SubprocessError, IndexError, UnicodeDecodeError):
        return None
