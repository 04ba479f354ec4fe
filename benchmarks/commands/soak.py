"""``python -m benchmarks soak``: mixed traffic for a long time, in slices that add up."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.commands.server_options import CheckpointOption, HostArguments, ReferenceOption
from deft_backend.cli.errors import host_arguments, reported
from deft_backend.cli.interrupted import unwound
from deft_backend.cli.serve import HostOption, chosen_host


def soak(
    out: Annotated[Path, typer.Option(help="JSON file; a later run goes on where it ends.")],
    host_args: HostArguments = None,
    host: HostOption = None,
    seconds: Annotated[
        float, typer.Option(min=1.0, help="Seconds of traffic in all, including earlier runs.")
    ] = 1200.0,
    slice_seconds: Annotated[
        float | None,
        typer.Option(min=1.0, help="Seconds of traffic of one server; default: all at once."),
    ] = None,
    model: CheckpointOption = None,
    shape: Annotated[
        str | None, typer.Option(help="Default: llama-3.1-8b; tiny without a GPU.")
    ] = None,
    reference: ReferenceOption = None,
    start_timeout: Annotated[
        float, typer.Option(min=1.0, help="Time limit for a server's start, in seconds.")
    ] = 500.0,
) -> None:
    """Send mixed traffic to a server with the plugin, and check a sample of its answers.

    Requests join, hang up and evict each other from the cache. After each slice the host's own
    backend computes the sampled answers again. Exits with 1 if an answer is wrong, a request
    failed, or memory still grows after the first fifth of a slice.
    """
    from benchmarks.e2e.choice import ModelChoice, ServerChoice
    from benchmarks.e2e.prepare_run import ERRORS
    from benchmarks.row_files import RowsError
    from benchmarks.soak import Soak, run

    console = Console()
    wanted = Soak(
        out, seconds, slice_seconds or seconds,
        ServerChoice(
            chosen_host(host, needed=True), None, reference, tuple(host_arguments(host_args)),
            start_seconds=start_timeout,
        ),
        ModelChoice(model, shape),
        shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
    )  # fmt: skip
    stopped = f"all servers have ended; finished slices are in {out}"
    with unwound(console, stopped), reported(*ERRORS, RowsError):
        total = run(wanted, typer.echo)
    typer.echo(str(total))
    raise typer.Exit(not total["ok"])
