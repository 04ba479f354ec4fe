"""`deft ab` over time: two servers, requests that arrive when they do, and one sentence."""

from __future__ import annotations

import asyncio
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from deft_backend.cli.ab_choices import (
    check_backends,
    make_report_folder,
    report_folder,
    written_into,
)
from deft_backend.cli.ab_live_table import print_live
from deft_backend.cli.ab_traffic import Asked, asked_traffic
from deft_backend.cli.errors import fail, reported
from deft_backend.cli.interrupted import unwound
from deft_backend.cli.models import served_model
from deft_backend.cli.progress import ProgressWatcher
from deft_backend.cli.serve import chosen_host
from deft_backend.cli.shown import say

if TYPE_CHECKING:
    from deft_backend.tools.ab.live_result import LiveResult
    from deft_backend.tools.ab.live_run import Side
    from deft_backend.tools.harness.live_client import Offers
    from deft_backend.tools.harness.traffic import Traffic

FAULTS = 1
"""Exit code if a server lost a request, or an answer differs and rounding does not explain it."""


def run_live(asked: Asked) -> None:
    """Compare, print, write the report and exit."""
    from deft_backend.files.folders import state_directory
    from deft_backend.policies import PolicyError
    from deft_backend.settings.config import Settings, SettingsError
    from deft_backend.tools.ab.live_report import write_live_report
    from deft_backend.tools.ab.live_sides import running_sides, started_sides
    from deft_backend.tools.ab.workloads import WorkloadError
    from deft_backend.tools.harness.live_client import LiveError, base_url
    from deft_backend.tools.servers.command import StartError
    from deft_backend.tools.servers.driver_stub import DriverStubError
    from deft_backend.tools.traces.trace_files import TraceError

    console = Console()
    folder = report_folder(asked.out)
    with (
        reported(WorkloadError, TraceError, PolicyError, SettingsError, LiveError),
        ProgressWatcher([], console) as progress,
    ):
        if asked.urls is not None:
            _refuse_options(asked)
            state_folder = state_directory(Settings.from_env())
            urls = base_url(asked.urls[0]), base_url(asked.urls[1])
            build = asked_traffic(asked, on_gpu=not any(_on_cpu(url, state_folder) for url in urls))
            both_answer(urls)
            model, sides = asked.model, running_sides(urls, state_folder)
        else:
            model = None
            name, host, extra, on_gpu = _server(asked)
            build = asked_traffic(asked, on_gpu=on_gpu)
            sides = started_sides(
                name, host, folder, progress, policy=asked.policy, baseline=asked.baseline,
                host_arguments=extra,
            )  # fmt: skip
        make_report_folder(folder)
        with (
            reported(StartError, DriverStubError),
            unwound(console, "no server of this command is left") as stopped,
        ):
            result = compare_live(sides, build, model, progress)
            progress.stop()
            print_live(result, console)
            with written_into(folder):
                page, data = write_live_report(result, folder, shlex.join(["deft", *sys.argv[1:]]))
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
    from deft_backend.tools.servers.command import use_gpu, vllm_is_cpu_build

    host = chosen_host(asked.host, compared=True)
    check_backends(asked.policy, asked.baseline, host)
    served, extra = served_model(asked.model, asked.revision, list(asked.extra))
    served.check()
    on_gpu = use_gpu() and not (host == "vllm" and vllm_is_cpu_build())
    return served.name, host, asked.drafting.arguments(host, extra), on_gpu


def _on_cpu(url: str, folder: Path) -> bool:
    from deft_backend.tools.harness.live_counters import LiveCounters

    state = LiveCounters(url, folder).state()
    return state is not None and state.device.startswith("cpu")


def compare_live(
    sides: tuple[Side, Side],
    build: Callable[[Offers], list[Traffic]],
    model: str | None,
    progress: ProgressWatcher,
) -> LiveResult:
    """Run both sides, one after the other; an interrupted run gives what it has."""
    from deft_backend.files.provenance import provenance
    from deft_backend.tools.ab.live_result import compare_sides
    from deft_backend.tools.ab.live_run import SideRun, run_side, silent_side
    from deft_backend.tools.harness.live_client import LiveError

    made: list[Traffic] = []

    def traffics(offers: Offers) -> list[Traffic]:
        if not made:
            made.extend(build(offers))
        return made

    found: list[SideRun] = []
    interrupted = False
    with reported(LiveError):
        for side in sides:
            first = found[0] if found else None
            progress.announce(side.title)
            try:
                with side.open() as live:
                    run, interrupted = asyncio.run(
                        run_side(live, side.name, traffics, model, first, progress)
                    )
            except LiveError as error:
                if first is None:
                    raise
                run = silent_side(side, first, str(error))  # keep what the first one did
            except KeyboardInterrupt:  # while the second server starts
                if first is None:
                    raise
                interrupted = True
                break
            found.append(run)
            if interrupted:
                break
    names = (sides[0].name, sides[1].name)
    return compare_sides(names, found, made, interrupted, provenance())


def both_answer(urls: Sequence[str]) -> None:
    """Before a long run on the first server, check that both servers answer."""
    from deft_backend.tools.harness.live_client import LiveClient, LiveError

    async def ask() -> None:
        for url in urls:
            async with LiveClient(url) as client:
                await client.models()

    with reported(LiveError):
        asyncio.run(ask())
