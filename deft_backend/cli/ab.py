"""`deft ab`: send the same requests to two servers, and compare tokens, KV reads and times."""

import asyncio
import shlex
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deft_backend.cli.ab_choices import (
    Asked,
    Drafting,
    asked_workloads,
    check_backends,
    make_report_folder,
    report_folder,
    written_into,
)
from deft_backend.cli.ab_table import print_result
from deft_backend.cli.errors import checked_settings, fail, host_arguments, reported, say
from deft_backend.cli.interrupted import unwound
from deft_backend.cli.models import ModelOption, RevisionOption, served_model
from deft_backend.cli.serve import HostOption, chosen_host
from deft_backend.files.folders import state_directory
from deft_backend.files.provenance import provenance
from deft_backend.policies import POLICY_NAMES, PolicyError
from deft_backend.tools.ab.progress import Progress
from deft_backend.tools.ab.report import write_report
from deft_backend.tools.ab.result import AbResult, compare_sides
from deft_backend.tools.ab.run import SideRun, run_side, silent_side
from deft_backend.tools.ab.sides import AbError, Side, running_sides, started_sides
from deft_backend.tools.ab.workloads import CHOICES
from deft_backend.tools.harness.client import Offers, ServerClient, ServerError, base_url
from deft_backend.tools.harness.server_counters import ServerCounters
from deft_backend.tools.harness.workload import Workload, WorkloadError
from deft_backend.tools.servers.command import StartError, use_gpu, vllm_is_cpu_build
from deft_backend.tools.servers.driver_stub import DriverStubError
from deft_backend.tools.traces.arrivals import is_arrival_trace
from deft_backend.tools.traces.made_arrivals import MOST_TOKENS
from deft_backend.tools.traces.recorded_trees import TraceError

FAULTS = 1
"""Exit code if a server lost a request or gave a wrong token, or with ``--exact`` another one."""


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
    exact: Annotated[
        bool | None,
        typer.Option(
            help="Compare log-probabilities, and exit with 1 for any difference; default: only "
            "for own servers without --rate and arrivals."
        ),
    ] = None,
) -> None:
    """Compare two servers on the same requests: tokens, KV reads and times.

    The command starts a model's server without and then with the plugin, or takes two servers that
    run (--urls). The exit code is 1 if a server lost a request or gave a wrong token; with --exact,
    it is 1 if any token differs.
    """
    extra = host_arguments(host_args)
    drafting = Drafting(speculative, draft_tokens)
    drafting.check()
    arrivals = trace is not None and is_arrival_trace(trace)
    if not arrivals and (speed is not None or limit is not None):
        raise fail("--speed and --limit belong to --trace with a trace of arrivals (.jsonl)")
    if speed is not None and rate is not None:
        raise fail("--speed is for the trace's own times, and --rate replaces them; omit one")
    if find_spec("aiohttp") is None:
        raise fail("aiohttp is not installed; run: pip install 'deft-backend[bench]'")
    if exact is None:
        exact = urls is None and rate is None and not arrivals
    _run(
        Asked(
            urls=urls, model=model, revision=revision, host=host, workloads=workload, rate=rate,
            sizes=(branches, prefix_tokens, max_tokens), quick=quick, trace=trace,
            arrivals=arrivals, index=index, scale=scale, speed=speed, limit=limit, seed=seed,
            policy=policy, baseline=baseline, extra=tuple(extra), drafting=drafting, out=out,
            exact=exact,
        )
    )  # fmt: skip


def _run(asked: Asked) -> None:
    """Compare, print, write the report and exit."""
    settings = checked_settings()
    console = Console()
    folder = report_folder(asked.out)
    with (
        reported(WorkloadError, TraceError, PolicyError, ServerError),
        Progress(console) as progress,
    ):
        if asked.urls is not None:
            _refuse_options(asked)
            state_folder = state_directory(settings)
            urls = base_url(asked.urls[0]), base_url(asked.urls[1])
            on_gpu = not any(_on_cpu(url, state_folder) for url in urls)
            build = asked_workloads(asked, on_gpu=on_gpu)
            both_answer(urls)
            model, sides = asked.model, running_sides(urls, state_folder)
        else:
            model = None
            name, host, extra, on_gpu = _server(asked)
            build = asked_workloads(asked, on_gpu=on_gpu)
            sides = started_sides(
                name, host, folder, progress, policy=asked.policy, baseline=asked.baseline,
                host_arguments=extra,
            )  # fmt: skip
            say(console, f"deft ab · {name}")
        make_report_folder(folder)
        with (
            reported(StartError, DriverStubError, AbError),
            unwound(console, "no server of this command is left") as stopped,
        ):
            result = compare(sides, build, model, progress, exact=asked.exact)
            progress.stop()
            print_result(result, console)
            with written_into(folder):
                page, data = write_report(result, folder, shlex.join(["deft", *sys.argv[1:]]))
    say(console, f"report  {page}")
    say(console, f"data    {data}")
    if stopped.number is not None:
        raise typer.Exit(128 + stopped.number)
    if result.faults:
        raise typer.Exit(FAULTS)


def _refuse_options(asked: Asked) -> None:
    """Refuse options that only servers started by this command can take."""
    given = {
        "--revision": asked.revision, "--host": asked.host, "--policy": asked.policy,
        "--baseline": asked.baseline, "--speculative": asked.drafting.draft,
        "host options behind '--'": asked.extra or None,
    }  # fmt: skip
    for name, value in given.items():
        if value is not None:
            raise fail(f"{name} cannot change servers that already run; leave it out with --urls")


def _server(asked: Asked) -> tuple[str, str, list[str], bool]:
    """Model, host, the host's options, and whether it runs on a GPU."""
    host = chosen_host(asked.host, needed=False)
    check_backends(asked.policy, asked.baseline, host)
    served, extra = served_model(asked.model, asked.revision, list(asked.extra))
    served.check()
    chosen_host(host, compared=True)
    on_gpu = use_gpu() and not (host == "vllm" and vllm_is_cpu_build())
    return served.name, host, asked.drafting.arguments(host, extra), on_gpu


def _on_cpu(url: str, folder: Path) -> bool:
    state = ServerCounters(url, folder).state()
    return state is not None and state.device.startswith("cpu")


def compare(
    sides: tuple[Side, Side],
    build: Callable[[Offers], list[Workload]],
    model: str | None,
    progress: Progress,
    *,
    exact: bool,
) -> AbResult:
    """Run both sides, one after the other; an interrupted run gives what it has."""
    made: list[Workload] = []

    def workloads(offers: Offers) -> list[Workload]:
        if not made:
            made.extend(build(offers))
        return made

    runs: list[SideRun] = []
    interrupted = False
    for side in sides:
        first = runs[0] if runs else None
        progress.announce(side.title)
        try:
            with side.open() as server:
                run, interrupted = asyncio.run(
                    run_side(server, side.name, workloads, model, first, progress, exact)
                )
        except ServerError as error:
            if first is None:
                raise
            run = silent_side(side, first, str(error))  # keep what the first one did
        except KeyboardInterrupt:  # while the second server starts
            if first is None:
                raise
            interrupted = True
            break
        runs.append(run)
        if interrupted:
            break
    names = (sides[0].name, sides[1].name)
    return compare_sides(
        names, runs, made, interrupted=interrupted, provenance=provenance(), exact=exact
    )


def both_answer(urls: Sequence[str]) -> None:
    """Before a long run on the first server, check that both servers answer."""

    async def ask() -> None:
        for url in urls:
            async with ServerClient(url) as client:
                await client.models()

    asyncio.run(ask())
