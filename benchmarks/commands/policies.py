"""``python -m benchmarks policies``: the table of policies of docs/reproduction.md."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.row_files import RowsError, read_rows, write_rows
from deft_backend.cli.errors import reported


def policies(
    files: Annotated[list[Path], typer.Argument(help="Files that kernel --policies wrote.")],
    out: Annotated[Path | None, typer.Option(help="One file for all rows.")] = None,
) -> None:
    """Print each policy's time over auto's, and the rows on which auto is not the fastest."""
    from benchmarks.kernel.policy_table import MOST, slower, table

    keys = ("set", "tree", "heads", "planner", "us")
    with reported(RowsError):
        found = [read_rows(file, keys, "kernel --policies") for file in files]
        rows = [row for mine, _ in found for row in mine]
        if out is not None:
            runs = [run for _, header in found for run in header.get("runs", [header])]
            write_rows(out, rows, {**runs[-1], "runs": runs})
    typer.echo(table(rows))
    behind = slower(rows)
    typer.echo(f"\nauto takes more than {MOST} times the fastest policy on {len(behind)} rows:")
    for line in behind:
        typer.echo(f"- {line}")
