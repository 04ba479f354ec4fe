"""``python -m benchmarks papers``: the papers' tables, measured with this project's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table as Shown

from benchmarks.commands.kernel_choice import make_setup, one_of, require_device, words
from benchmarks.e2e.command import HostArguments, TogetherOption
from deft_backend.cli.errors import fail, host_arguments, reported, say

COUNTED, COUNTERS, STEPS, SERVERS = "deft-io", "counters", "deft-steps", "servers"
PLACE_OF_STEPS = "DeFT, Figure 4, Tables 5 and 8"
_WIDTH = 160


def papers(
    host_args: HostArguments = None,
    tables: Annotated[
        str | None,
        typer.Option(
            "--table", metavar="TABLE[,TABLE…]", help="Tables to measure; default: all of them."
        ),
    ] = None,
    traces: Annotated[
        Path | None, typer.Option(help="Folder of DeFT's recorded trees, for tables that need it.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="fp16 or bf16.")] = "bf16",
    without: Annotated[
        str, typer.Option(metavar="METHOD[,METHOD…]", help="Methods to leave out.")
    ] = "",
    host: Annotated[
        str | None,
        typer.Option(help="Table servers: sglang or vllm; the table is left out without it."),
    ] = None,
    policies: Annotated[
        str, typer.Option(metavar="POLICY[,POLICY…]", help="Table servers: one server for each.")
    ] = "auto",
    checkpoint: Annotated[
        Path | None, typer.Option(help="Table servers: folder that keeps the model.")
    ] = None,
    together: TogetherOption = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Two workloads of each table, shorter measurements.")
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder for papers-<table>.json.")] = Path(
        "reports/papers"
    ),
    device: Annotated[
        str, typer.Option(help="cuda, or cpu (with --quick): checks results and times nothing.")
    ] = "cuda",
) -> None:
    """Measure tables and figures of DeFT, FastTree and FlashForge; every result is checked.

    docs/reproduction.md compares the figures with the papers'.
    """
    from benchmarks.kernel.methods.ours import Ours
    from benchmarks.papers.record import counted_io, ratios, record
    from benchmarks.papers.tables import TABLES, method_named
    from deft_backend.tools.traces.recorded_trees import TraceError

    known = {table.name: table for table in TABLES}
    every = (*known, STEPS, COUNTED, COUNTERS, SERVERS)
    chosen = list(every) if tables is None else words(tables)
    for name in chosen:
        one_of("--table", name, every)
    if host is None and SERVERS in chosen:
        if tables is not None:
            raise fail("the table servers runs a host; name it with --host sglang or --host vllm")
        chosen.remove(SERVERS)
    one_of("--dtype", dtype, ("fp16", "bf16"))
    needing = [
        name
        for name in chosen
        if name in (COUNTED, SERVERS) or (name in known and known[name].traces)
    ]
    if traces is None and needing:
        if tables is not None:
            raise fail(f"{needing[0]} needs DeFT's recorded trees; add --traces FOLDER")
        chosen = [name for name in chosen if name not in needing]
    options = host_arguments(host_args)
    if options and SERVERS not in chosen:
        raise fail("options of the host are for the table servers, which is left out")
    if set(chosen) - {COUNTED, SERVERS}:
        require_device(device, quick)
    console = Console(width=None if Console().is_terminal else _WIDTH)
    folder = traces or Path()
    left_out = set(words(without))
    for name in chosen:
        path = out / f"papers-{name}.json"
        with reported(TraceError):
            if name == COUNTED:
                for row in counted_io(folder, path):
                    say(console, f"{row['workload']}: {row['saved_percent']} % of KV read saved")
                continue
            if name == COUNTERS:
                _counters(path, console)
                continue
            if name == SERVERS:
                assert host is not None
                _servers(host, words(policies), folder, out, checkpoint, options, together=together)
                continue
            table = known["deft-architectures" if name == STEPS else name]
            if quick:
                table = replace(table, workloads=lambda t, whole=table: whole.workloads(t)[:2])  # type: ignore[misc]
            methods = [method_named(m) for m in table.methods if m not in left_out]
            ours = next(m for m in methods if isinstance(m, Ours))
            peers = [m for m in methods if m is not ours]
            setup = make_setup(
                ours, peers, 128, dtype, device, "shuffled", 0, eager=False, quick=quick
            )
            if name == STEPS:
                _steps(table, setup, path, console)
                continue
            rows = record(table, setup, folder, path, lambda row: say(console, _line(row)))
            console.print(_shown(table.place, rows, ratios(rows, ours.name)), soft_wrap=True)
            say(console, f"{path}")


def _steps(table: Any, setup: Any, path: Path, console: Console) -> None:
    """The parts of a step of whole models (DeFT, Figure 4, Tables 5 and 8)."""
    from benchmarks.kernel.measure_case import DTYPES
    from benchmarks.papers.record import record
    from benchmarks.papers.steps import MODELS, dense_us, step_row
    from benchmarks.row_files import write_rows
    from deft_backend.files.provenance import provenance

    heads = sorted({(shape.query_heads, shape.kv_heads) for shape in MODELS.values()})
    parts = path.with_name(f"{path.stem}-attention.json")
    attention = record(replace(table, heads=heads), setup, Path(), parts, lambda row: None)
    parts.unlink()
    rows = []
    for model, shape in MODELS.items():
        for row in (row for row in attention if row["heads"] == shape.heads):
            dense = dense_us(shape, round(row["batch"]), DTYPES[setup.dtype], setup.budget)
            rows.append(step_row(model, row, *dense, baseline="flash-decoding"))
            write_rows(path, rows, {**provenance(), "table": STEPS, "place": PLACE_OF_STEPS})
            say(console, f"{model}, {row['workload']}: {rows[-1]['step_ms']}")


def _counters(path: Path, console: Console) -> None:
    """DRAM bytes and utilisation (FlashForge, Figure 6; DeFT, Table 14)."""
    from benchmarks.papers.counters import METHODS, TREES, NoCountersError, counted
    from benchmarks.row_files import write_rows
    from deft_backend.files.provenance import provenance

    rows = []
    with reported(NoCountersError):
        for tree in TREES:
            for method in METHODS:
                rows.append(counted(method, tree, "32/8"))
                write_rows(path, rows, {**provenance(), "table": COUNTERS})
                say(console, f"{rows[-1]}")


def _servers(
    host: str, policies: list[str], traces: Path, out: Path, checkpoint: Path | None,
    options: Sequence[str], *, together: bool,
) -> None:  # fmt: skip
    """Whole servers: DeFT's end-to-end tables, and FastTree's comparison with SGLang.

    A server for each policy, and the host's own backend last; all add to one file of rows, and get
    the same requests: the papers' reasoning trees, few-shot prompts and documents.
    """
    from benchmarks.e2e.command import (
        ERRORS,
        ModelChoice,
        measure_servers,
        policy_for,
        served_model,
    )
    from benchmarks.e2e.launch import HOSTS, Launch, checked_backends
    from benchmarks.papers.workloads import FEW_SHOT, PROMPT_TOKENS

    one_of("--host", host, tuple(HOSTS))
    chosen = HOSTS[host]
    on_gpu = chosen.on_gpu()
    choice = ModelChoice(weights="dummy" if on_gpu else "random", checkpoint=checkpoint)
    with reported(*ERRORS), served_model(chosen, choice) as model:
        checked_backends(chosen, (chosen.ours, chosen.reference()))
        launch = Launch(chosen, model, options)
        launches: list[tuple[Launch, list[str]]] = [
            (replace(launch, policy=policy_for(policy, chosen, [chosen.ours])), [chosen.ours])
            for policy in policies
        ]
        measure_servers(
            [*launches, (launch, [chosen.reference()])],
            ["grid", "documents", "trees"],
            [f"grid:{PROMPT_TOKENS},{width},64" for width in FEW_SHOT] if on_gpu else [],
            None,
            2,
            traces,
            out / f"papers-servers-{host}.json",
            reference=chosen.reference(),
            together=together,
        )


def _line(row: dict[str, Any]) -> str:
    times = ", ".join(f"{name} {us}" for name, us in row["us"].items() if us is not None)
    return f"{row['workload']} {row['heads']}: {times}"


def _shown(place: str, rows: list[dict[str, Any]], means: dict[str, float]) -> Shown:
    names = list(rows[0]["us"]) if rows else []
    table = Shown("workload", "heads", *names, title=f"{place}: microseconds")
    for row in rows:
        times = [row["us"].get(name) for name in names]
        table.add_row(
            row["workload"], row["heads"], *("–" if us is None else f"{us:.1f}" for us in times)
        )
    table.add_section()
    table.add_row(
        "geometric mean of ratios", "", *(f"{means.get(n, float('nan')):.2f}" for n in names)
    )
    return table
