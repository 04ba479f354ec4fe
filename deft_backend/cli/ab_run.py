"""What `deft ab` does: check the options, compare two servers, print and write the report."""

from __future__ import annotations

import datetime
import errno
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console

from deft_backend.cli.errors import checked_settings, fail, reported, say, state_folder, unwound
from deft_backend.cli.models import ChosenModel, ModelFilesError, served_context, served_model
from deft_backend.cli.serve import chosen_host
from deft_backend.files.folders import create_private
from deft_backend.tools.ab.comparison import GoodputAsked, both_answer, compare
from deft_backend.tools.ab.report import print_result, write_report
from deft_backend.tools.ab.sides import AbError, Progress, running_sides, started_sides
from deft_backend.tools.ab.workloads import (
    CHOICES,
    WORKLOADS,
    Sizes,
    check_fits,
    default_sizes,
    make_workloads,
    trace_workload,
)
from deft_backend.tools.harness.client import Offers, ServerError, base_url
from deft_backend.tools.harness.open_loop import BOUND_MS
from deft_backend.tools.harness.server_counters import ServerCounters
from deft_backend.tools.harness.workload import Workload, WorkloadError, poisson
from deft_backend.tools.servers.command import (
    BACKEND,
    BACKEND_NAMES,
    StartError,
    check_port,
    use_gpu,
    value_of,
    vllm_is_cpu_build,
)
from deft_backend.tools.servers.driver_stub import DriverStubError
from deft_backend.tools.traces.arrivals import TraceError, load_arrivals

FAULTS = 1
"""Exit code if a server lost a request or gave a wrong token, or with ``--exact`` another one."""


@dataclass(frozen=True)
class AbOptions:
    urls: tuple[str, str] | None
    model: str | None
    host: str | None
    workloads: Sequence[str]
    rate: float | None
    sizes: tuple[int | None, int | None, int | None]
    quick: bool
    trace: Path | None
    baseline: str | None
    extra: Sequence[str]
    out: Path | None
    exact: bool | None
    goodput: bool
    bound_ms: float | None

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys(self.workloads or ([] if self.trace else WORKLOADS)))

    def check(self) -> None:
        for name in self.names:
            if name not in CHOICES:
                raise WorkloadError(
                    f"there is no workload {name!r}; expected one of {', '.join(CHOICES)}"
                )
        if self.bound_ms is not None and not self.goodput:
            raise fail("--bound-ms belongs to --goodput, which is missing")
        if self.rate is not None:
            poisson(1, self.rate)  # refuses an impossible rate now
        given = {
            "--host": self.host,
            "--baseline": self.baseline,
            "host options behind '--'": self.extra or None,
        }
        for name, asked in given.items() if self.urls else ():
            if asked is not None:
                raise fail(
                    f"{name} cannot change servers that already run; leave it out with --urls"
                )
        sizes = zip(("--branches", "--prefix-tokens", "--max-tokens"), self.sizes, strict=True)
        for name, value in [*sizes, ("--quick", self.quick or None)]:
            if value is not None and not self.names:
                raise fail(f"{name} is for workloads, and a trace has its own sizes; omit {name}")


def asked_workloads(
    asked: AbOptions, *, on_gpu: bool, context: int | None = None
) -> Callable[[Offers], list[Workload]]:
    """Read the trace; the requests wait for the server's tokenizer."""
    arrivals = [] if asked.trace is None else load_arrivals(asked.trace)
    default = default_sizes(on_gpu=on_gpu, quick=asked.quick)
    sizes = Sizes(*(own or size for own, size in zip(asked.sizes, default, strict=True)))

    check_fits(asked.names, sizes, arrivals, context)

    def build(offers: Offers) -> list[Workload]:
        check_fits(asked.names, sizes, arrivals, offers.context)
        ratio = offers.characters_a_token
        made = make_workloads(asked.names, sizes, characters_a_token=ratio)
        workloads = [workload.arriving(asked.rate) for workload in made]
        if asked.trace is None:
            return workloads
        return [*workloads, trace_workload(arrivals, asked.trace.name, ratio, rate=asked.rate)]

    return build


@contextmanager
def written_into(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise fail(
            f"cannot write the report into {folder}: {error.strerror or error}; name a folder "
            "with --out"
        ) from None


def run_asked(asked: AbOptions) -> None:
    checked_settings()
    console = Console()
    exact = asked.exact
    if exact is None:
        timed = asked.rate is not None or asked.goodput or asked.trace is not None
        exact = asked.urls is None and not timed  # log-probabilities cost time
    folder = asked.out or Path("reports") / f"ab-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    problems = (WorkloadError, TraceError, ServerError, ModelFilesError, StartError)
    with reported(*problems), Progress(console) as progress:
        asked.check()
        servers = state_folder()
        if asked.urls is not None:
            urls = base_url(asked.urls[0]), base_url(asked.urls[1])
            states = [ServerCounters(url, servers).state() for url in urls]
            on_gpu = not any(state and state.device.startswith("cpu") for state in states)
            build = asked_workloads(asked, on_gpu=on_gpu)
            both_answer(urls)
            model, sides = asked.model, running_sides(urls, servers, progress)
        else:
            model = None
            served, host, extra, on_gpu = _server(asked)
            name = served.name
            context = served_context(served, extra)
            build = asked_workloads(asked, on_gpu=on_gpu, context=context)
            places = (folder, servers)
            sides = started_sides(
                name, host, *places, progress, baseline=asked.baseline, host_arguments=extra
            )
            say(console, f"deft ab · {name}")
        with written_into(folder):
            create_private(folder)
            if not os.access(folder, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        with (
            reported(DriverStubError, AbError),
            unwound(console, "no server of this command is left") as stopped,
        ):
            goodput = GoodputAsked(asked.bound_ms or BOUND_MS, asked.rate or 1.0)
            result = compare(
                *(sides, build, model, progress),
                exact=exact,
                goodput=goodput if asked.goodput else None,
            )
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
    if not any(w.agreement.compared for w in result.workloads):
        raise fail("nothing was compared: no request was answered by both servers")


def _server(asked: AbOptions) -> tuple[ChosenModel, str, list[str], bool]:
    host = chosen_host(asked.host, needed=False)
    ours = ("", BACKEND, BACKEND_NAMES[host])
    if asked.baseline is not None and asked.baseline.strip() in ours:
        raise fail(f"--baseline is {asked.baseline!r}; expected a backend of the host's own")
    served, extra = served_model(asked.model, asked.extra), list(asked.extra)
    served.check()
    chosen_host(host, compared=True)
    check_port(extra)
    if value_of("--api-key", extra) is not None and not os.environ.get("OPENAI_API_KEY"):
        raise fail("--api-key is given behind '--'; set OPENAI_API_KEY to the same key as well")
    on_gpu = use_gpu() and not (host == "vllm" and vllm_is_cpu_build())
    return served, host, extra, on_gpu
