"""``python -m benchmarks kernel``, and the commands that merge and draw its files."""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from benchmarks.commands.kernel_choice import (
    FAILED,
    chosen_methods,
    chosen_part,
    chosen_policies,
    chosen_workloads,
    make_setup,
    one_of,
    parse_page_size,
    require_device,
    words,
)
from deft_backend.cli.errors import fail, reported, say, stderr
from deft_backend.settings.policy_names import POLICY_NAMES

if TYPE_CHECKING:
    from benchmarks.kernel.kernel_rows import Row

_WIDTH = 160


def kernel(
    sets: Annotated[
        str | None,
        typer.Option(
            "--set",
            metavar="SET[,SET…]",
            help="Sets of trees: fasttree, deft, flashforge, unshared, mixed, traces, tiny. "
            "Default: all except tiny; traces needs --traces. verify: several query tokens a "
            "request; with --traces also token trees.",
        ),
    ] = None,
    tree: Annotated[
        list[str] | None,
        typer.Option(
            help="Your own tree: 'nodes per level  tokens per node', such as '1,20 4000,200'."
        ),
    ] = None,
    traces: Annotated[
        Path | None, typer.Option(help="DeFT's recorded trees: a file, or a folder of them.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Decode steps of each recorded tree.")] = 6,
    heads: Annotated[
        str | None,
        typer.Option(
            metavar="Q/KV[,Q/KV…]", help="Query and KV heads. Default: those of each set."
        ),
    ] = None,
    head_dim: Annotated[int, typer.Option(min=16, help="Head dimension.")] = 128,
    dtype: Annotated[str, typer.Option(help="fp16 or bf16.")] = "fp16",
    kv_dtype: Annotated[
        str, typer.Option(help="KV cache: fp8_e4m3, fp8_e5m2, or the same as the queries.")
    ] = "same",
    page_size: Annotated[
        str,
        typer.Option(
            help="Tokens per page. auto: 16 if all lengths are multiples of 16, otherwise 1."
        ),
    ] = "auto",
    layout: Annotated[
        str, typer.Option(help="Place of the pages: shuffled in a larger pool, or contiguous.")
    ] = "shuffled",
    policy: Annotated[
        str, typer.Option(help=f"Policy of deft: {', '.join(POLICY_NAMES)}.")
    ] = "auto",
    planner: Annotated[
        str,
        typer.Option(
            help="Planner of deft: host, or device. With device, the attention makes every kernel "
            "launch that a server's CUDA graph holds."
        ),
    ] = "host",
    kernels_of: Annotated[
        str | None,
        typer.Option(
            metavar="GPU",
            help="Run the plain kernels of deft as on this GPU, such as sm_80 or sm_89, with the "
            "SMs of the one here; compare with the peers flashinfer-fa2 and fa2.",
        ),
    ] = None,
    policies: Annotated[
        str | None,
        typer.Option(
            metavar="POLICY[,POLICY…]",
            help="Compare these policies, or all, with each other instead of with peers. A second "
            "file of rows, policies-GPU.json, holds their times.",
        ),
    ] = None,
    peers: Annotated[
        str,
        typer.Option(
            metavar="PEER[,PEER…]", help="Kernels to compare with; none for no comparison."
        ),
    ] = "flashinfer,cascade,fa3,flash-decoding",
    part: Annotated[
        str | None,
        typer.Option(metavar="I/N", help="Measure only every Nth case, starting with the Ith."),
    ] = None,
    eager: Annotated[
        bool,
        typer.Option("--eager", help="Time kernel launches from Python instead of CUDA graphs."),
    ] = False,
    phases: Annotated[
        bool,
        typer.Option(
            "--phases",
            help="Also time each kernel launch of deft alone; the rows hold it in facts.",
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the data and of the page order.")] = 0,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Two trees per set, two steps per recording, shorter measurements."
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for rows and plots; default: reports/kernel-<time>.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="cuda, or cpu (with --quick): checks results and times nothing.")
    ] = "cuda",
) -> None:
    """Time decode attention on trees of shared prefixes, check every result and draw the plots.

    Exits with 1 if a result of deft is wrong or missing, or if two runs differ.
    """
    from benchmarks.kernel.case_inputs import LAYOUTS
    from benchmarks.kernel.measure_case import KV_DTYPES
    from benchmarks.kernel.record_cases import (
        DeviceLost,
        failures,
        record,
        rows_file,
        write_policies,
    )
    from benchmarks.kernel.tree_workloads import WorkloadChoiceError, cases_of, parse_heads
    from benchmarks.row_files import RowsError
    from deft_backend.forest import ForestError
    from deft_backend.policies import PolicyError
    from deft_backend.tools.traces.recorded_trees import TraceError

    one_of("--dtype", dtype, ("fp16", "bf16"))
    one_of("--kv-dtype", kv_dtype, tuple(KV_DTYPES))
    one_of("--layout", layout, LAYOUTS)
    one_of("--device", device, ("cuda", "cpu"))
    size = parse_page_size(page_size)
    with reported(WorkloadChoiceError, TraceError, ForestError, PolicyError):
        shapes = [parse_heads(text) for text in words(heads)] if heads is not None else None
        chosen = chosen_workloads(sets, tree, traces, 2 if quick else steps, device, quick)
        cases = chosen_part(cases_of(chosen, shapes, size), part)
        if policies is None:
            ours, others = chosen_methods(policy, planner, peers, kernels_of, device)
        else:
            ours, others = chosen_policies(policies, planner)
    if phases and planner == "device":
        raise fail("--phases needs plans of the host planner; leave out --planner device")
    require_device(device, quick)
    console = Console()
    setup = make_setup(
        ours, others, head_dim, dtype, device, layout, seed, eager, quick, phases, kv_dtype
    )
    for name, reason in setup.unavailable.items():
        say(console, f"without {name}: {reason}")
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    path = rows_file(out or Path("reports") / f"kernel-{stamp}", setup.device)
    options = {
        "sets": sets, "tree": tree, "heads": heads, "page_size": page_size, "layout": layout,
        "policy": policy, "policies": policies, "planner": planner, "kernels_of": kernels_of,
        "peers": peers, "part": part,
        "launch": "eager" if eager else "graph", "seed": seed, "quick": quick, "steps": steps,
        "traces": traces is not None,
    }  # fmt: skip
    with _Watch(len(cases), console) as watch:
        try:
            rows = record(cases, setup, path, options, watch.row)
        except DeviceLost as error:
            raise fail(f"{error}: {path}") from None
        except RowsError as error:
            raise fail(str(error)) from None
    if policies is None:
        _show(rows, path, console)
    else:
        say(console, f"rows: {write_policies(path, rows, planner)}")
    found = failures(rows)
    for line in found:
        stderr.print(f"[bold red]wrong[/bold red] {line}", highlight=False, soft_wrap=True)
    if found:
        raise typer.Exit(FAILED)


def kernel_merge(
    files: Annotated[
        list[Path],
        typer.Argument(help="Files of rows that 'kernel' wrote, for example one for each --part."),
    ],
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
) -> None:
    """Merge the rows of several runs into one file and draw it. Later rows replace earlier ones."""
    from benchmarks.kernel.kernel_rows import merged, read_rows
    from benchmarks.row_files import RowsError, write_rows

    with reported(RowsError):
        rows, header = merged([(path, *read_rows(path)) for path in files])
        write_rows(out, rows, header)
    _show(rows, out, Console())


def _show(rows: Sequence[Row], path: Path, console: Console) -> None:
    from benchmarks.commands.kernel_tables import means_table, rows_table

    show = console if console.is_terminal else Console(width=_WIDTH)
    for table in (rows_table(rows), means_table(rows)):
        show.print(table)
    say(console, f"rows    {path}")


class _Watch:
    """Progress: a bar on a terminal, a line a case in a log."""

    def __init__(self, cases: int, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.description}"), console=console, transient=True,
            disable=not console.is_terminal,
        )  # fmt: skip
        self._task = self._progress.add_task("", total=cases)

    def __enter__(self) -> _Watch:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def row(self, row: Row) -> None:
        from benchmarks.commands.kernel_tables import row_line

        self._progress.update(self._task, advance=1, description=row["workload"])
        if not self._console.is_terminal:
            say(self._console, row_line(row))
