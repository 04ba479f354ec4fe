"""`deft ab`: compare the host's own attention with the plugin, on the same requests."""

from __future__ import annotations

import datetime
import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from deft_backend.ab.workloads import WORKLOADS
from deft_backend.cli.errors import fail, host_arguments, reported
from deft_backend.cli.interrupted import unwound
from deft_backend.cli.models import ModelOption, RevisionOption, served_model
from deft_backend.cli.serve import HostOption, chosen_host
from deft_backend.policies import POLICY_NAMES, PolicyError, get_policy

if TYPE_CHECKING:
    from deft_backend.ab.comparison import AbResult, AbSetup

TOKENS_DIFFER = 1


def ab(
    host_args: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- HOST OPTIONS]", help="Both servers get them unchanged."),
    ] = None,
    model: ModelOption = None,
    revision: RevisionOption = None,
    host: HostOption = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(WORKLOADS)}; may be repeated. Default: all."),
    ] = None,
    branches: Annotated[
        int | None, typer.Option(min=1, help="Requests that run at the same time in each workload.")
    ] = None,
    prefix_tokens: Annotated[
        int | None,
        typer.Option(min=1, help="About how many tokens a workload's requests share."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens that each request decodes.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="A recorded tree of thoughts; default: a generated one."),
    ] = None,
    index: Annotated[int, typer.Option(min=0, help="Which tree of the trace.")] = 0,
    scale: Annotated[
        float, typer.Option(help="Multiplies the lengths of the trace's prompt and thoughts.")
    ] = 1.0,
    policy: Annotated[
        str | None, typer.Option(help=f"The plugin's policy: {', '.join(POLICY_NAMES)}.")
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(help="The host's backend to compare with; default: its choice."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the report; default: reports/ab-<time>.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller workloads.")] = False,
) -> None:
    """Start a model's server without and with the plugin; compare tokens, KV reads and times.

    The exit code is 1 if any token differs.
    """
    extra = host_arguments(host_args)
    setup, on_gpu = _setup(
        model, revision, workload, (branches, prefix_tokens, max_tokens), trace, index, scale,
        policy, baseline, extra, quick, host,
    )  # fmt: skip
    for package in ("aiohttp", "matplotlib"):
        if find_spec(package) is None:
            raise fail(f"{package} is not installed; run: pip install 'deft-backend[bench]'")
    chosen_host(setup.host, compared=True)

    from deft_backend.ab.report import write_report

    console = Console()
    stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = out or Path("reports") / f"ab-{stamp}"
    console.print(f"[bold]deft ab[/bold] · {setup.model}", highlight=False)
    if not on_gpu:
        console.print("[bold yellow]no GPU: times mean nothing, KV reads are exact[/bold yellow]")
    result = _run(setup, folder, console)
    _print_result(result, console)
    page, data = write_report(result, folder, shlex.join(["deft", *sys.argv[1:]]))
    console.print(f"report  {page}", highlight=False, soft_wrap=True)
    console.print(f"data    {data}", highlight=False, soft_wrap=True)
    if not result.same:
        raise typer.Exit(TOKENS_DIFFER)


def _setup(
    model: str | None,
    revision: str | None,
    workload: list[str] | None,
    asked: tuple[int | None, int | None, int | None],
    trace: Path | None,
    index: int,
    scale: float,
    policy: str | None,
    baseline: str | None,
    extra: list[str],
    quick: bool,
    host: str | None,
) -> tuple[AbSetup, bool]:
    """Check all input before a server starts."""
    from deft_backend.ab import sizes
    from deft_backend.ab.comparison import AbSetup
    from deft_backend.ab.workloads import WorkloadError
    from deft_backend.servers.command import BACKEND, BACKEND_NAMES, use_gpu, vllm_is_cpu_build
    from deft_backend.traces.trace_files import TraceError, load_thought_trees

    host = chosen_host(host, needed=False)
    names = list(dict.fromkeys(workload or WORKLOADS))
    if baseline in (BACKEND, BACKEND_NAMES[host]):
        raise fail(f"--baseline is {baseline!r}, the plugin itself; expected a host's backend")
    if trace is not None and "tree-of-thoughts" not in names:
        raise fail("--trace is replayed by the workload tree-of-thoughts, which is not selected")
    if trace is None and (scale != 1.0 or index):
        raise fail("--scale and --index belong to --trace, which is missing")
    with reported(PolicyError, WorkloadError, TraceError):
        if policy is not None:
            get_policy(policy)
        for name in names:
            if name not in WORKLOADS:
                raise WorkloadError(
                    f"there is no workload {name!r}; expected one of {', '.join(WORKLOADS)}"
                )
        tree = None
        if trace is not None:
            trees = load_thought_trees(trace)
            if index >= len(trees):
                raise TraceError(f"{trace} holds {len(trees)} trees; expected --index below that")
            tree = trees[index]
        served, extra = served_model(model, revision, extra)
        served.check()
        on_gpu = use_gpu() and not (host == "vllm" and vllm_is_cpu_build())
        default = sizes.default_sizes(on_gpu=on_gpu, quick=quick)
        chosen = sizes.Sizes(
            asked[0] or default.branches,
            asked[1] or default.prefix_tokens,
            asked[2] or default.max_tokens,
        )
        plans = sizes.make_plans(
            names,
            chosen,
            characters_a_token=sizes.characters_a_token(served.tokenizer()),
            tree=tree,
            scale=scale,
        )
    return AbSetup(served.name, tuple(plans), policy, baseline, tuple(extra), host), on_gpu


def _run(setup: AbSetup, folder: Path, console: Console) -> AbResult:
    from deft_backend.ab.comparison import AbError, run_ab
    from deft_backend.cli.progress import ProgressWatcher
    from deft_backend.harness.send_plan import PlanError
    from deft_backend.servers.command import LaunchError
    from deft_backend.servers.driver_stub import DriverStubError

    errors = (AbError, PlanError, LaunchError, DriverStubError)
    with (
        ProgressWatcher(setup.plans, console) as watcher,
        unwound(console, "no server is left"),
        reported(*errors),
    ):
        return run_ab(setup, folder, watcher)


def _say_cpu(console: Console) -> None:
    from rich.panel import Panel

    from deft_backend.ab.report import CPU_TIMES, KV_MEANING

    console.print(Panel(f"[bold]{CPU_TIMES}[/bold] {KV_MEANING}", border_style="yellow"))


def _print_result(result: AbResult, console: Console) -> None:
    from deft_backend.cli.ab_table import divergence_lines, result_tables

    for table in result_tables(result):
        console.print(table)
    if not result.on_gpu:
        _say_cpu(console)
    answers = sum(w.agreement.answers for w in result.workloads)
    if result.same:
        console.print(f"[green]✓ all {answers} answers have the same tokens[/green]")
    else:
        for line in divergence_lines(result):
            console.print(line, highlight=False)
        console.print("[bold red]✗ tokens differ[/bold red]")
