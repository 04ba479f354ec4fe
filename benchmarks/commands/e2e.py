"""``python -m benchmarks e2e``: real servers, measured in turn; ``e2e-merge``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from benchmarks.commands.kernel_choice import FAILED, words
from benchmarks.commands.server_options import (
    CheckpointOption,
    HostArguments,
    ReferenceOption,
    TogetherOption,
)
from benchmarks.commands.summary import show
from deft_backend.cli.errors import fail, host_arguments, reported, say, stderr
from deft_backend.cli.interrupted import unwound
from deft_backend.cli.serve import HostOption, chosen_host
from deft_backend.settings.policy_names import POLICY_NAMES

if TYPE_CHECKING:
    from benchmarks.e2e.choice import Choice

_WIDTH = 170


def e2e(
    host_args: HostArguments = None,
    host: HostOption = None,
    backends: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME…]",
            help="Default: the plugin and the host's backends. host: the host's default.",
        ),
    ] = None,
    workloads: Annotated[
        str,
        typer.Option(
            metavar="NAME[,NAME…]",
            help="grid, first-tokens, documents, trees, beams, draft-trees, rollouts, agents, "
            "chats, clients, traffic, scheduler.",
        ),
    ] = "grid",
    case: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[WORKLOAD:]PREFIX,BRANCHES,SUFFIX[:TOKENS]",
            help="A case in place of the workload's default ones; may be repeated. Branches: "
            "requests, beams, samples or sessions. Suffix: own tokens; of rollouts, prompts. "
            "Tokens: in place of --gen.",
        ),
    ] = None,
    gen: Annotated[
        int | None,
        typer.Option(min=1, help="Output tokens to time; of rollouts, the longest answer's."),
    ] = None,
    repeats: Annotated[
        int | None,
        typer.Option(
            min=1, help="Repeats of each batch or tree. The median counts; scheduler: the fastest."
        ),
    ] = None,
    traces: Annotated[
        Path | None, typer.Option(help="DeFT's recorded trees of thoughts: a file or a folder.")
    ] = None,
    scale: Annotated[
        float, typer.Option(min=0.001, help="Factor on the lengths of the trees.")
    ] = 1.0,
    client_shapes: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME…]",
            help="Shapes of the host's own client: default, 64-groups, tiny.",
        ),
    ] = None,
    client_runs: Annotated[
        int,
        typer.Option(
            min=1, help="Runs of each shape, with other prompts each time; the median counts."
        ),
    ] = 1,
    minutes: Annotated[float, typer.Option(min=0.01, help="Minutes of mixed traffic.")] = 8.0,
    part: Annotated[
        int, typer.Option(min=1, help="Which traffic: another number sends other requests.")
    ] = 1,
    tolerance: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="Traffic: two tokens with log-probabilities closer than this are a tie."
        ),
    ] = None,
    reference: ReferenceOption = None,
    model: CheckpointOption = None,
    shape: Annotated[
        str | None,
        typer.Option(
            help="llama-3.1-8b, llama-3.1-70b, four-layers, one-layer, or tiny (default without a "
            "GPU); with --weights dummy: gpt-oss-20b, qwen3.5-9b."
        ),
    ] = None,
    layers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Write only so many layers of --shape, if all of them do not fit the GPUs."
        ),
    ] = None,
    tp: Annotated[
        int, typer.Option(min=1, help="GPUs over which each server splits the model.")
    ] = 1,
    drafts: Annotated[
        str | None,
        typer.Option(
            metavar="KIND,TOKENS,ACCEPTED",
            help="Servers draft: eagle, ngram or mtp, query tokens of a verification, and tokens "
            "that the host is forced to accept in each.",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(help=f"The plugin's policy; the rows name it: {', '.join(POLICY_NAMES)}."),
    ] = None,
    weights: Annotated[
        str, typer.Option(help="random, or dummy: then only times can be compared.")
    ] = "random",
    checkpoint: Annotated[
        Path | None, typer.Option(help="Folder that keeps the written checkpoint for later runs.")
    ] = None,
    out: Annotated[
        Path, typer.Option(help="JSON file of rows; an existing file is added to.")
    ] = Path("reports/e2e.json"),
    start_timeout: Annotated[
        float, typer.Option(min=1.0, help="Time limit for a server's start, in seconds.")
    ] = 500.0,
    together: TogetherOption = False,
) -> None:
    """Send the same requests to a server of each backend in turn, and compare.

    The rows are written after every workload, so an interrupted run keeps them. Later runs with
    other backends or workloads add to the same file. Exits with 1 if a row has an error.
    """
    from benchmarks.e2e.choice import (
        BatchChoice,
        Choice,
        ClientChoice,
        ModelChoice,
        Output,
        ServerChoice,
        TrafficChoice,
        TreeChoice,
    )

    command = shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]])
    choice = Choice(
        Output(out, command),
        words(workloads),
        ServerChoice(
            chosen_host(host, needed=False), _listed(backends), reference,
            tuple(host_arguments(host_args)), tp, start_timeout, drafts, policy,
        ),
        ModelChoice(model, shape, weights, checkpoint, layers),
        BatchChoice(case or (), gen, repeats),
        TreeChoice(traces, scale),
        ClientChoice(_listed(client_shapes), client_runs),
        TrafficChoice(minutes, part, tolerance),
    )  # fmt: skip
    run_choice(choice, together=together)


def _listed(names: str | None) -> list[str] | None:
    return None if names is None else words(names)


def run_choice(choice: Choice, *, together: bool = False) -> None:
    """Run the benchmark, show its rows, and exit with 1 if a row has an error.

    Raises
    ------
    typer.Exit
        With 2 and a message if the user can fix the error.
    """
    from benchmarks.e2e.backend_runs import record, record_together
    from benchmarks.e2e.plain_check import PLAIN
    from benchmarks.e2e.prepare_run import ERRORS, prepared
    from benchmarks.row_files import RowsError

    console = Console()
    if together and PLAIN in (choice.servers.backends or ()):
        raise fail(f"{PLAIN} checks answers without a server; leave --together out")
    if find_spec("aiohttp") is None:
        raise fail("aiohttp is not installed; run: pip install 'deft-backend[bench]'")
    stopped = f"all servers have ended; the rows of finished workloads are in {choice.output.rows}"
    with (
        unwound(console, stopped), reported(*ERRORS, RowsError), prepared(choice) as setup,
    ):  # fmt: skip
        if not setup.launch.host.on_gpu():
            stderr.print(
                "[yellow]no usable GPU: answers are checked, but times mean nothing[/yellow]"
            )
        said = partial(say, console)
        rows = record_together([setup], said) if together else record(setup, said)
    _show(choice.output.rows, console)
    if any(row["error"] for row in rows):
        raise typer.Exit(FAILED)


def e2e_merge(
    files: Annotated[list[Path], typer.Argument(help="Files of rows that 'e2e' wrote.")],
    out: Annotated[
        Path | None, typer.Option(help="JSON file to write. Default: only show and draw.")
    ] = None,
) -> None:
    """Merge the rows of several runs into one file, show them and draw them."""
    from benchmarks.e2e.serving_rows import merged
    from benchmarks.row_files import RowsError, write_rows

    with reported(RowsError):
        rows, header = merged(files)
        if out is None and len(files) > 1:
            raise fail("several files are merged into one; name it with --out")
        if out is not None:
            write_rows(out, rows, header)
    _show(out or files[0], Console())


def _show(path: Path, console: Console) -> None:
    from benchmarks.e2e.serving_rows import read_rows
    from benchmarks.e2e.serving_tables import bars_table, rows_table

    rows, header = read_rows(path)

    def draw() -> Iterable[Path]:
        from benchmarks.e2e import serving_plots as plots

        return plots.draw(rows, header, path)

    show(console, (rows_table(rows), bars_table(rows)), _WIDTH, path, draw)
