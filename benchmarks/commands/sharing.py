"""``python -m benchmarks sharing``: the table and the plot of docs/where-sharing-pays.md."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.e2e.where_sharing_pays import RESULTS, draw, recorded_cases, table
from benchmarks.row_files import RowsError, make_folder
from deft_backend.cli.errors import fail, reported


def sharing(
    out: Annotated[Path, typer.Option(help="The plot to write.")] = RESULTS
    / "where-sharing-pays.svg",
) -> None:
    """Print the table of recorded times against shared tokens, and draw its plot."""
    with reported(RowsError):
        make_folder(out)
    cases = recorded_cases()
    typer.echo(table(cases))
    try:
        draw(cases, out)
    except OSError as error:
        raise fail(f"cannot write {out}: {error.strerror or error}") from None
