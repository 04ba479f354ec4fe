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

from deft_backend.cli.ab_table import print_result
from deft_backend.cli.errors import checked_settings, fail, reported, say
from deft_backend.cli.interrupted import unwound
from deft_backend.cli.models import served_model
from deft_backend.cli.serve import check_policy, chosen_host
from deft_backend.files.folders import create_private, state_directory
from deft_backend.tools.ab.comparison import both_answer, compare
from deft_backend.tools.ab.progress import Progress
from deft_backend.tools.ab.report import write_report
from deft_backend.tools.ab.sides import AbError, running_sides, started_sides
from deft_backend.tools.ab.trace_workload import trace_workload
from deft_backend.tools.ab.workloads import (
    CHOICES,
    WORKLOADS,
    Sizes,
    default_sizes,
    make_workloads,
)
from deft_backend.tools.harness.client import Offers, ServerError, base_url
from deft_backend.tools.harness.server_counters import ServerCounters
from deft_backend.tools.harness.workload import Workload, WorkloadError, poisson
from deft_backend.tools.servers.command import (
    BACKEND,
    BACKEND_NAMES,
    StartError,
    use_gpu,
    vllm_is_cpu_build,
)
from deft_backend.tools.servers.driver_stub import DriverStubError
from deft_backend.tools.traces.arrivals import load_arrivals
from deft_backend.tools.traces.recorded_trees import MOST_TOKENS, ThoughtTree, TraceError
from deft_backend.tools.traces.trace_files import load_thought_trees

FAULTS = 1
"""Exit code if a server lost a request or gave a wrong token, or with ``--exact`` another one."""


def chosen_workloads(asked: Sequence[str] | None) -> list[str]:
    """Names of workloads, each once; raises WorkloadError if one is unknown."""
    for name in asked or ():
        if name not in CHOICES:
            raise WorkloadError(
                f"there is no workload {name!r}; expected one of {', '.join(CHOICES)}"
            )
    return list(dict.fromkeys(asked or WORKLOADS))


def chosen_tree(
    trace: Path | None, index: int, scale: float, names: Sequence[str]
) -> ThoughtTree | None:
    """The tree of a trace in DeFT's format; raises TraceError if the file has no such tree."""
    if trace is None:
        if scale != 1.0 or index:
            raise fail("--scale and --index belong to --trace, which is missing")
        return None
    if "tree-of-thoughts" not in names:
        raise fail("--trace needs --workload tree-of-thoughts, which is not selected")
    trees = load_thought_trees(trace)
    if index >= len(trees):
        raise TraceError(f"{trace} holds {len(trees)} trees; expected --index below that")
    return trees[index]


def check_baseline(baseline: str | None, host: str) -> None:
    """Refuse a baseline that is not the host's."""
    if baseline is not None and not baseline.strip():
        raise fail(f"--baseline is {baseline!r}; expected a backend of the host")
    if baseline in (BACKEND, BACKEND_NAMES[host]):
        raise fail(f"--baseline is {baseline!r}, the plugin itself; expected a host's backend")


@dataclass(frozen=True)
class Asked:
    """The command's options, as the user gave them."""

    urls: tuple[str, str] | None
    model: str | None
    revision: str | None
    host: str | None
    workloads: Sequence[str] | None
    rate: float | None
    sizes: tuple[int | None, int | None, int | None]
    quick: bool
    trace: Path | None
    arrivals: bool
    index: int
    scale: float
    speed: float | None
    seed: int
    policy: str | None
    baseline: str | None
    extra: tuple[str, ...]
    out: Path | None
    exact: bool


def asked_workloads(asked: Asked, *, on_gpu: bool) -> Callable[[Offers], list[Workload]]:
    """Read and check what the user named; the requests wait for the server's tokenizer."""
    names: list[str] = []
    if asked.workloads or not asked.arrivals:
        names = chosen_workloads(asked.workloads)
    tree, arrivals = None, []
    if asked.arrivals:
        assert asked.trace is not None
        _refuse_idle_options(asked, names)
        if not 0 < asked.scale < float("inf"):
            raise fail(f"--scale is {asked.scale}; expected a number above 0")
        loaded = load_arrivals(asked.trace)
        arrivals = [arrival.scaled(asked.scale) for arrival in loaded]
        longest = max(arrival.input_length for arrival in arrivals)
        if longest > MOST_TOKENS:  # making its text would take the client's memory
            raise fail(
                f"with --scale {asked.scale:g}, a prompt of {asked.trace} has {longest:,} tokens; "
                f"expected at most {MOST_TOKENS:,}"
            )
    else:
        tree = chosen_tree(asked.trace, asked.index, asked.scale, names)
    if asked.rate is not None:
        poisson(1, asked.rate, asked.seed)  # refuses an impossible rate now
    if asked.speed is not None and not 0 < asked.speed < float("inf"):
        raise fail(f"--speed is {asked.speed}; expected a number above 0")
    default = default_sizes(on_gpu=on_gpu, quick=asked.quick)
    sizes = Sizes(*(own or size for own, size in zip(asked.sizes, default, strict=True)))

    def build(offers: Offers) -> list[Workload]:
        ratio = offers.characters_a_token
        made = make_workloads(names, sizes, characters_a_token=ratio, tree=tree, scale=asked.scale)
        workloads = [workload.arriving(asked.rate, asked.seed) for workload in made]
        if arrivals and asked.trace is not None:
            workloads.append(
                trace_workload(
                    arrivals, name=asked.trace.name, characters_a_token=ratio,
                    speed=asked.speed or 1.0, rate=asked.rate, seed=asked.seed,
                )
            )  # fmt: skip
        return workloads

    return build


def _refuse_idle_options(asked: Asked, names: Sequence[str]) -> None:
    """Refuse options that a trace of arrivals leaves without effect."""
    if asked.index:
        raise fail(f"--index is {asked.index}; it selects a tree, and {asked.trace} has arrivals")
    sizes = dict(zip(("--branches", "--prefix-tokens", "--max-tokens"), asked.sizes, strict=True))
    for name, value in {**sizes, "--quick": asked.quick or None}.items():
        if value is not None and not names:
            raise fail(f"{name} is for workloads, and a trace has its own sizes; omit {name}")


def make_report_folder(folder: Path) -> None:
    """Make the report's folder before anything runs: a run may take hours."""
    with written_into(folder):
        create_private(folder)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


@contextmanager
def written_into(folder: Path) -> Iterator[None]:
    """Turn errors of writing the report into a message."""
    try:
        yield
    except OSError as error:
        raise fail(
            f"cannot write the report into {folder}: {error.strerror or error}; name a folder "
            "with --out"
        ) from None


def run_asked(asked: Asked) -> None:
    """Compare, print, write the report and exit."""
    settings = checked_settings()
    console = Console()
    folder = asked.out or Path("reports") / f"ab-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    with reported(WorkloadError, TraceError, ServerError), Progress(console) as progress:
        if asked.urls is not None:
            _refuse_options(asked)
            state_folder = state_directory(settings)
            urls = base_url(asked.urls[0]), base_url(asked.urls[1])
            on_gpu = not any(_on_cpu(url, state_folder) for url in urls)
            build = asked_workloads(asked, on_gpu=on_gpu)
            both_answer(urls)
            model, sides = asked.model, running_sides(urls, state_folder, progress)
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
        "--baseline": asked.baseline, "host options behind '--'": asked.extra or None,
    }  # fmt: skip
    for name, value in given.items():
        if value is not None:
            raise fail(f"{name} cannot change servers that already run; leave it out with --urls")


def _server(asked: Asked) -> tuple[str, str, list[str], bool]:
    """Model, host, the host's options, and whether it runs on a GPU."""
    host = chosen_host(asked.host, needed=False)
    check_policy(asked.policy)
    check_baseline(asked.baseline, host)
    served, extra = served_model(asked.model, asked.revision, list(asked.extra))
    served.check()
    chosen_host(host, compared=True)
    on_gpu = use_gpu() and not (host == "vllm" and vllm_is_cpu_build())
    return served.name, host, extra, on_gpu


def _on_cpu(url: str, folder: Path) -> bool:
    state = ServerCounters(url, folder).state()
    return state is not None and state.device.startswith("cpu")
