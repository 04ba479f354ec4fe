"""`deft ab`: compare the host's own attention with the plugin, on the same requests."""

from __future__ import annotations

import shlex
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from deft_backend.cli.ab_choices import (
    Drafting,
    check_backends,
    chosen_tree,
    chosen_workloads,
    make_report_folder,
    report_folder,
    written_into,
)
from deft_backend.cli.ab_live import run_live
from deft_backend.cli.ab_traffic import Asked
from deft_backend.cli.errors import fail, host_arguments, reported
from deft_backend.cli.interrupted import unwound
from deft_backend.cli.models import ModelOption, RevisionOption, served_model
from deft_backend.cli.serve import HostOption, chosen_host
from deft_backend.policies import POLICY_NAMES, PolicyError
from deft_backend.tools.ab.workloads import CHOICES
from deft_backend.tools.traces.arrivals import is_arrival_trace
from deft_backend.tools.traces.made_arrivals import MOST_TOKENS

if TYPE_CHECKING:
    from deft_backend.tools.ab.comparison import AbResult, AbSetup

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
        typer.Option(
            help=f"One of {', '.join(CHOICES)}; may be repeated. Default: all but rollouts, or "
            "the trace of arrivals."
        ),
    ] = None,
    urls: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="A B", help="Compare two servers that run; --model picks a model."),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Average requests a second, at random times; default: all at once."),
    ] = None,
    branches: Annotated[
        int | None,
        typer.Option(
            min=1, max=100_000, help="Requests that run at the same time in each workload."
        ),
    ] = None,
    prefix_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_TOKENS, help="About how many tokens a workload's requests share."
        ),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens that each request decodes.")
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="A tree of thoughts, or arrivals in Mooncake's format (.jsonl)."),
    ] = None,
    speed: Annotated[
        float | None, typer.Option(help="Replay a trace of arrivals this many times as fast.")
    ] = None,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Only the first requests of a trace of arrivals.")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of random arrivals and of the text of a trace.")
    ] = 0,
    index: Annotated[int, typer.Option(min=0, help="Which tree of the trace.")] = 0,
    scale: Annotated[
        float, typer.Option(max=1000, help="Multiplies the lengths of the trace.")
    ] = 1.0,
    policy: Annotated[
        str | None, typer.Option(help=f"The plugin's policy: {', '.join(POLICY_NAMES)}.")
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(help="The host's backend to compare with; default: its choice."),
    ] = None,
    speculative: Annotated[
        str | None,
        typer.Option(
            metavar="DRAFT",
            help="Both servers speculate: 'ngram', or a draft model's folder or name.",
        ),
    ] = None,
    draft_tokens: Annotated[
        int | None, typer.Option(min=1, help="Draft tokens of a verification; default: 4.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the report; default: reports/ab-<time>.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller workloads.")] = False,
) -> None:
    """Compare two servers on the same requests: tokens, KV reads and times.

    The command starts a model's server without and then with the plugin, or takes two servers that
    run (--urls). The exit code is 1 if any token differs. With --urls, --rate or a trace of
    arrivals, it is 1 if a server lost a request or gave a wrong token.
    """
    extra = host_arguments(host_args)
    drafting = Drafting(speculative, draft_tokens)
    drafting.check()
    arrivals = trace is not None and is_arrival_trace(trace)
    if not arrivals and (speed is not None or limit is not None):
        raise fail("--speed and --limit belong to --trace with a trace of arrivals (.jsonl)")
    if speed is not None and rate is not None:
        raise fail("--speed is for the trace's own times, and --rate replaces them; omit one")
    if urls is not None or rate is not None or arrivals:
        _packages("aiohttp")
        run_live(
            Asked(
                urls=urls, model=model, revision=revision, host=host, workloads=workload,
                rate=rate, sizes=(branches, prefix_tokens, max_tokens), quick=quick, trace=trace,
                arrivals=arrivals, index=index, scale=scale, speed=speed, limit=limit, seed=seed,
                policy=policy, baseline=baseline, extra=tuple(extra),
                drafting=drafting, out=out,
            )
        )  # fmt: skip
        return
    setup, on_gpu = _setup(
        model, revision, workload, (branches, prefix_tokens, max_tokens), trace, index, scale,
        policy, baseline, extra, drafting, quick, host,
    )  # fmt: skip
    _packages("aiohttp", "matplotlib")
    chosen_host(setup.host, compared=True)

    from deft_backend.tools.ab.report import write_report

    console = Console()
    folder = report_folder(out)
    make_report_folder(folder)
    console.print(f"[bold]deft ab[/bold] · {setup.model}", highlight=False)
    if not on_gpu:
        console.print("[bold yellow]no GPU: times mean nothing, KV reads are exact[/bold yellow]")
    result = _run(setup, folder, console)
    _print_result(result, console)
    with written_into(folder):
        page, data = write_report(result, folder, shlex.join(["deft", *sys.argv[1:]]))
    console.print(f"report  {page}", highlight=False, soft_wrap=True)
    console.print(f"data    {data}", highlight=False, soft_wrap=True)
    if not result.same:
        raise typer.Exit(TOKENS_DIFFER)


def _packages(*needed: str) -> None:
    for package in needed:
        if find_spec(package) is None:
            raise fail(f"{package} is not installed; run: pip install 'deft-backend[bench]'")


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
    drafting: Drafting,
    quick: bool,
    host: str | None,
) -> tuple[AbSetup, bool]:
    """Check all input before a server starts."""
    from deft_backend.tools.ab import sizes
    from deft_backend.tools.ab.comparison import AbSetup
    from deft_backend.tools.ab.workloads import WorkloadError
    from deft_backend.tools.servers.command import use_gpu, vllm_is_cpu_build
    from deft_backend.tools.traces.trace_files import TraceError

    host = chosen_host(host, needed=False)
    with reported(PolicyError, WorkloadError, TraceError):
        check_backends(policy, baseline, host)
        names = chosen_workloads(workload)
        tree = chosen_tree(trace, index, scale, names)
        served, extra = served_model(model, revision, extra)
        served.check()
        on_gpu = use_gpu() and not (host == "vllm" and vllm_is_cpu_build())
        extra = drafting.arguments(host, extra)
        plans = sizes.make_plans(
            names,
            sizes.chosen_sizes(asked, on_gpu=on_gpu, quick=quick),
            characters_a_token=sizes.characters_a_token(served.tokenizer()),
            tree=tree,
            scale=scale,
        )
    return AbSetup(served.name, tuple(plans), policy, baseline, tuple(extra), host), on_gpu


def _run(setup: AbSetup, folder: Path, console: Console) -> AbResult:
    from deft_backend.cli.progress import ProgressWatcher
    from deft_backend.tools.ab.comparison import AbError, run_ab
    from deft_backend.tools.harness.send_plan import PlanError
    from deft_backend.tools.servers.command import StartError
    from deft_backend.tools.servers.driver_stub import DriverStubError

    errors = (AbError, PlanError, StartError, DriverStubError)
    with (
        ProgressWatcher(setup.plans, console) as watcher,
        unwound(console, "no server is left"),
        reported(*errors),
    ):
        return run_ab(setup, folder, watcher)


def _say_cpu(console: Console) -> None:
    from rich.panel import Panel

    from deft_backend.tools.ab.report import CPU_TIMES, KV_MEANING

    console.print(Panel(f"[bold]{CPU_TIMES}[/bold] {KV_MEANING}", border_style="yellow"))


def _print_result(result: AbResult, console: Console) -> None:
    from deft_backend.cli.ab_table import acceptance_line, divergence_lines, result_tables

    for table in result_tables(result):
        console.print(table)
    accepted = acceptance_line(result)
    if accepted is not None:
        console.print(accepted, highlight=False)
    if not result.on_gpu:
        _say_cpu(console)
    answers = sum(w.agreement.answers for w in result.workloads)
    if result.same:
        console.print(f"[green]✓ all {answers} answers have the same tokens[/green]")
    else:
        for line in divergence_lines(result):
            console.print(line, highlight=False)
        console.print("[bold red]✗ tokens differ[/bold red]")
