"""``python -m benchmarks kernel``: sets of trees, every result checked, then timed."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from benchmarks.ceilings import measure_ceilings
from benchmarks.e2e.command import listed, typed_command
from benchmarks.kernel.kernel_rows import Row, averaged, line_of
from benchmarks.kernel.measure_case import DTYPES, KV_DTYPES, DeviceLost, Setup, measure, pooled
from benchmarks.kernel.methods import METHODS, OURS, make_method
from benchmarks.kernel.methods.ours import PLANNERS, Ours
from benchmarks.kernel.sets import Spec, chosen
from benchmarks.kernel.tree_workloads import WorkloadChoiceError, cases_of, parse_heads
from benchmarks.row_files import RowsError, driver, write_rows
from deft_backend.cli.errors import fail, reported, say, stderr
from deft_backend.files.provenance import provenance
from deft_backend.forest import ForestError
from deft_backend.kernels import HEAD_DIMS, Gpu
from deft_backend.policies import PolicyError
from deft_backend.tools.traces.arrivals import TraceError

ERRORS = (WorkloadChoiceError, TraceError, ForestError, PolicyError, RowsError)


def kernel(
    sets: Annotated[
        str | None,
        typer.Option(
            "--set",
            metavar="SET[,SET…]",
            help="Sets of benchmarks/kernel/sets.json: trees, or a paper's table. Default: "
            "fasttree, deft, flashforge, unshared, mixed, and traces with --traces.",
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
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--with",
            metavar="KEY=VALUE",
            help="In place of the sets' own: heads=32/8,32/32 dtype=bf16 kv_dtype=fp8_e4m3 "
            "page_size=16 layout policy planner=device kernels_of=sm_80 peers=fa3 seed steps.",
        ),
    ] = None,
    processes: Annotated[
        int,
        typer.Option(
            min=1,
            help="Processes that prepare and check cases side by side; each is timed alone. "
            "Every process holds a case in the GPU's memory.",
        ),
    ] = 1,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Two trees per set, two steps per recording, shorter measurements."
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Folder for rows; default: reports/kernel-<time>.")
    ] = None,
    device: Annotated[
        str, typer.Option(help="cuda, or cpu (with --quick): checks results and times nothing.")
    ] = "cuda",
) -> None:
    """Time decode attention on trees of shared prefixes, and check every result.

    Rows go to kernel-<GPU>.json, those of the set policies to policies-<GPU>.json, and a paper's
    table to papers-<set>.json. Exits with 1 if a result of deft is wrong or missing, or if
    two runs differ.
    """
    where = _device(device, quick)
    if sets is None:
        default = ["tiny"] if device == "cpu" else ["fasttree", "deft", "flashforge"]
        default += [] if device == "cpu" else ["unshared", "mixed"]
        sets = "" if tree else ",".join([*default, *(["traces"] if traces else [])])
    folder = out or Path("reports") / f"kernel-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    console = Console()
    rows: list[Row] = []
    failed: list[str] = []
    with reported(*ERRORS), pooled(processes) as mapped:
        found = chosen(listed(sets), tree or (), traces, overrides or (), short=quick)
        if not found:
            raise fail("nothing is selected; name a set with --set or a tree with --tree")
        for spec, workloads in found:
            setup = make_setup(spec, where, quick=quick)
            for name, reason in setup.unavailable.items():
                say(console, f"without {name}: {reason}")
            cases = cases_of(workloads, [parse_heads(text) for text in spec.heads], spec.page_size)
            header = header_of(spec, setup)
            alone = bool(spec.place) or spec.name == "policies"
            kind = "policies" if spec.name == "policies" else "kernel"
            name = f"papers-{spec.name}" if spec.place else f"{kind}-{_gpu(where)}"
            path, before = folder / f"{name}.json", [] if alone else rows
            measured = measure(cases, setup, mapped)
            mine = record(spec, measured, header, path, before, console)
            rows = rows if spec.place else [*rows, *mine]
            failed += failures(mine)
    say(console, f"rows    {folder}")
    for line in failed:
        stderr.print(f"[bold red]wrong[/bold red] {line}", highlight=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)


def record(
    spec: Spec,
    measured: Iterable[Row],
    header: dict[str, Any],
    path: Path,
    before: Sequence[Row],
    console: Console,
) -> list[Row]:
    """Measure a set; each row is on disk before the next case, behind the earlier sets' rows."""
    rows: list[Row] = []

    def write() -> None:
        shown: Sequence[Mapping[str, Any]] = averaged(rows) if spec.place else [*before, *rows]
        write_rows(path, shown, header)

    write()
    try:
        for row in measured:
            rows.append(row)
            write()
            say(console, line_of(row))
    except DeviceLost as error:
        raise fail(f"{error}: {path}") from None
    header["complete"] = True
    write()
    return rows


def make_setup(spec: Spec, device: torch.device, *, quick: bool) -> Setup:
    """The settings of a set's cases; measures the device's ceilings."""
    for key, value, known in (
        ("dtype", spec.dtype, tuple(DTYPES)),
        ("kv_dtype", spec.kv_dtype, tuple(KV_DTYPES)),
        ("layout", spec.layout, ("shuffled", "contiguous")),
        ("planner", spec.planner, PLANNERS),
        ("head_dim", str(spec.head_dim), tuple(map(str, HEAD_DIMS))),
        ("kernels_of", spec.kernels_of or "sm_80", tuple(set(Gpu.names()) - {"sm_90"})),
        *(("peers", peer, METHODS) for peer in spec.peers if "/" not in peer),
    ):
        if value not in known:
            raise fail(f"{key} is {value!r}; expected one of {', '.join(known)}")
    peers = [make_method(name, spec.planner) for name in spec.peers if name != "none"]
    reasons = {method.name: method.unavailable(device) for method in peers}
    return Setup(
        spec,
        Ours(OURS, spec.policy, spec.planner, spec.kernels_of or None),
        [method for method in peers if reasons[method.name] is None],
        device,
        15 if quick else 40,
        measure_ceilings(DTYPES[spec.dtype]) if device.type == "cuda" else None,
        {name: reason for name, reason in reasons.items() if reason is not None},
    )


def header_of(spec: Spec, setup: Setup) -> dict[str, Any]:
    """A record's header; it is ``complete`` after the last case."""
    came_from = provenance()
    methods = [setup.ours, *setup.peers]
    options = {**vars(spec), "heads": list(spec.heads), "peers": list(spec.peers)}
    run = {"date": came_from["date"], "command": typed_command(), "options": options}
    run["ceilings"] = setup.ceilings.to_dict() if setup.ceilings else None
    paper = {"table": spec.name, "place": spec.place, "claim": spec.claim} if spec.place else {}
    return {
        **came_from,
        "driver": driver() if setup.device.type == "cuda" else None,
        **paper,
        "dtype": spec.dtype,
        "planner": spec.planner,
        "methods": {method.name: method.origin() for method in methods} | setup.unavailable,
        "complete": False,
        "runs": [run],
    }


def failures(rows: Sequence[Row]) -> list[str]:
    """Cases in which the result of deft is wrong or missing, or differs between two runs."""
    found = []
    for row in rows:
        case = f"{row['set']}, {row['workload']}, heads {row['heads']}"
        if OURS in row["skipped"]:
            found.append(f"{case}: {row['skipped'][OURS]}")
        elif row["repeatable"] is False:
            found.append(f"{case}: two runs of the same batch differ")
    return found


def _device(device: str, quick: bool) -> torch.device:
    """Refuse to time anything on a machine without an NVIDIA GPU."""
    if device not in ("cuda", "cpu"):
        raise fail(f"--device is {device!r}; expected cuda or cpu")
    if device == "cpu":
        if not quick:
            raise fail("--device is 'cpu', where nothing is timed; add --quick to check results")
        return torch.device("cpu")
    if not torch.cuda.is_available() or torch.version.cuda is None:
        raise fail(
            "the kernel benchmark needs an NVIDIA GPU, and torch finds none; to check results "
            "without times: --device cpu --quick"
        )
    return torch.device("cuda", torch.cuda.current_device())


def _gpu(device: torch.device) -> str:
    """Such as ``h200``, by the device's name."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    found = re.search(r"\b[A-Z]+\d+\w*", name.upper().replace("NVIDIA", ""))
    return found.group().lower() if found else name.split()[-1].lower()
