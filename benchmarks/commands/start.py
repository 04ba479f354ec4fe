"""``python -m benchmarks start``: how long servers take until their first answer."""

from __future__ import annotations

import shlex
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.commands.kernel_choice import FAILED, words
from benchmarks.commands.server_options import HostArguments
from deft_backend.cli.errors import fail, host_arguments, reported, say
from deft_backend.cli.interrupted import unwound
from deft_backend.cli.serve import HostOption, chosen_host
from deft_backend.tools.ab.result import MISSING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.e2e.start_times import StartRow


def start(
    host_args: HostArguments = None,
    host: HostOption = None,
    backends: Annotated[
        str | None,
        typer.Option(metavar="NAME[,NAME…]", help="Default: the plugin and the host's own."),
    ] = None,
    shape: Annotated[
        str | None, typer.Option(help="llama-3.1-8b, or tiny (default without a GPU).")
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="GPUs over which a server splits the model.")] = 1,
    branches: Annotated[int, typer.Option(min=1, help="Requests of the batches.")] = 32,
    settle: Annotated[
        bool, typer.Option(help="Begin with a start of the host's own backend that is not counted.")
    ] = True,
    out: Annotated[
        Path, typer.Option(help="JSON file of rows; rows of other hosts and --tp are kept.")
    ] = Path("reports/start.json"),
    start_timeout: Annotated[
        float, typer.Option(min=1.0, help="Time limit for a server's start, in seconds.")
    ] = 500.0,
) -> None:
    """Start each backend with empty kernel caches, then with full ones; dummy weights.

    Exits with 1 if a server did not start.
    """
    from benchmarks.e2e.backends import HOSTS, Launch, ServerChoiceError, checked_backends
    from benchmarks.e2e.served_model import SHAPES, ModelError, write_model
    from benchmarks.e2e.start_times import start_times

    chosen = HOSTS[chosen_host(host, needed=False)]
    on_gpu = chosen.on_gpu()
    shape = shape or ("llama-3.1-8b" if on_gpu else "tiny")
    if shape not in SHAPES:
        raise fail(f"--shape is {shape!r}; expected one of {', '.join(SHAPES)}")
    with reported(ServerChoiceError):
        names = checked_backends(
            chosen, words(backends) if backends else (chosen.ours, chosen.reference())
        )
    # A model may have no use for the host's usual backend.
    settling = next((name for name in names if name != chosen.ours), chosen.reference())
    console = Console()
    rows, keep = _earlier(out, chosen.name, tp), True
    with (
        tempfile.TemporaryDirectory(prefix="deft-start-model-") as folder,
        unwound(console, f"all servers have ended; finished rows are in {out}"),
        reported(ModelError),
    ):
        model = write_model(Path(folder), shape, "dummy", "bfloat16" if on_gpu else "float32")
        options = tuple(host_arguments(host_args))
        launch = Launch(chosen, model, options=options, tensor_parallel=tp)
        for row in start_times(
            launch, names, out.with_suffix(".logs"), lambda line: say(console, line),
            prefix=4096 if on_gpu else 64, branches=branches, timeout=start_timeout,
            first=settling if settle else None,
        ):  # fmt: skip
            rows.append(row)
            keep = keep and row["error"] is None
            _write(out, rows)
    console.print(_table(rows))
    say(console, f"rows    {out}")
    if not keep:
        raise typer.Exit(FAILED)


def _earlier(out: Path, host: str, tp: int) -> list[StartRow]:
    """Rows in the file of other hosts, and of other numbers of GPUs."""
    from benchmarks.e2e.start_times import StartRow
    from benchmarks.row_files import RowsError, make_folder, read_rows

    with reported(RowsError):
        make_folder(out)
        if not out.is_file():
            return []
        found: Any = read_rows(out, StartRow.__required_keys__, "python -m benchmarks start")[0]
    return [row for row in found if (row["host"], row["tp"]) != (host, tp)]


def _write(out: Path, rows: Sequence[StartRow]) -> None:
    from benchmarks.row_files import RowsError, write_rows
    from deft_backend.files.provenance import driver, provenance

    command = shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])
    with reported(RowsError):
        write_rows(out, rows, {**provenance(), "driver": driver(), "command": command})


def _table(rows: Sequence[StartRow]) -> Table:
    table = Table(title="Start to first answer", title_justify="left")
    for name in ("host", "GPUs", "backend", "kernel cache"):
        table.add_column(name)
    for name in ("seconds", "first tokens of batches, ms"):
        table.add_column(name, justify="right")
    for row in rows:
        if row["error"]:
            said = Text(row["error"].splitlines()[0][:60], style="bold red")
            table.add_row(row["host"], str(row["tp"]), row["backend"], row["cache"], said)
            continue
        seconds = MISSING if row["seconds"] is None else f"{row['seconds']:.1f}"
        batches = ", ".join(f"{time:.0f}" for time in row["batches_ms"])
        table.add_row(row["host"], str(row["tp"]), row["backend"], row["cache"], seconds, batches)
    return table
