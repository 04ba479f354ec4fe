"""``python -m benchmarks kernel-check``: every supported combination against float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def kernel_check(
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    processes: Annotated[
        int | None, typer.Option(min=1, help="Worker processes; default: one for each core.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the forests and of the data.")] = 0,
    limit: Annotated[
        int, typer.Option(min=0, help="Check only the first N shapes; 0 checks all of them.")
    ] = 0,
) -> None:
    """Run the kernels in every supported combination and record their errors against float64.

    Exits with 1 if an error exceeds its tolerance.
    """
    from benchmarks.kernel.every_combination import check_all

    summary, failed = check_all(out, processes, seed, limit)
    typer.echo(json.dumps(summary))
    for row in failed[:20]:
        typer.echo(f"FAILED {row}")
    raise typer.Exit(bool(failed))
