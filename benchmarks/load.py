"""``python -m benchmarks load``: servers under an open loop of requests, each gap between tokens.

Requests arrive by a Poisson process, whether or not earlier ones have ended. Their prompts are
token ids through ``/v1/completions``, streamed, so the server encodes no text. Several client
processes share the requests, so that no client is the bottleneck. The client is that of
`deft ab --rate`, which says what a gap between tokens is.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.e2e.command import (
    ERRORS,
    CheckpointOption,
    HostArguments,
    LayersOption,
    ModelChoice,
    ShapeOption,
    StartOption,
    TpOption,
    checked_ranks,
    listed,
    policy_for,
    served_model,
    typed_command,
)
from benchmarks.e2e.launch import HOSTS, ChoiceError, Launch, checked_backends
from benchmarks.e2e.run import LOST, client_of, confirm_alive, server_of
from benchmarks.e2e.workloads import draw
from benchmarks.host_client import check_loads, figures_by_host
from benchmarks.row_files import driver, make_folder, write_rows
from deft_backend.cli.errors import host_arguments, reported, say, unwound
from deft_backend.cli.serve import HostOption, chosen_host
from deft_backend.files.provenance import provenance
from deft_backend.tools.harness.answers import ANSWERED
from deft_backend.tools.harness.open_loop import BOUND_MS, Figures, GoodputSearch
from deft_backend.tools.harness.workload import Replayed, Request, Workload, poisson, replay

LOADS = Path(__file__).with_name("loads.json")

WARM_UPS = 16
"""Requests before a load, of other ids: the host compiles kernels of its own in them."""

GOODPUT_SECONDS = 50.0
"""Each rate of the search for goodput lasts so long at least: a queue that grows shows late."""

CLIENT = "open loop, token ids through /v1/completions; gaps between pieces of a stream"

HEAD_START = 5.0
"""Seconds until the client processes, which import slowly, send the first request."""


@dataclass(frozen=True)
class Load:
    """One row of ``loads.json`` at one rate.

    - `prefixes`, `prefix`: shared prefixes, which requests choose in turn, and tokens of each.
    - `own`, `gen`: tokens of each request behind its prefix, and of its answer.
    - `rate`: requests a second; None sends all at once.
    - `turns`: of each conversation; only a host's client has several.
    - `repeat`: of the same load before; each has prompts of its own, which no cache holds.
    """

    name: str
    prefixes: int
    prefix: int
    own: int
    gen: int
    requests: int
    rate: float | None
    turns: int = 1
    repeat: int = 0

    @property
    def seed(self) -> str:
        return f"{self.name} {self.rate} {self.repeat}"

    def prompt(self, number: int, vocabulary: int) -> tuple[int, ...]:
        """The token ids of a request, the same in every process."""
        seed = f"{self.seed} prefix {number % max(1, self.prefixes)}"
        own = draw(random.Random(f"{self.seed} {number}"), vocabulary, self.own)
        return _prefix(seed, vocabulary, self.prefix) + own

    def arrivals(self) -> list[float]:
        """Seconds from the start until each request is sent."""
        return poisson(self.requests, self.rate)[0] if self.rate else [0.0] * self.requests


@lru_cache
def _prefix(seed: str, vocabulary: int, tokens: int) -> tuple[int, ...]:
    return draw(random.Random(seed), vocabulary, tokens)


def read_loads(names: Sequence[str]) -> list[Load]:
    """Loads of the file, ``NAME`` at all its rates or ``NAME@RATE``; raises ChoiceError."""
    known = json.loads(LOADS.read_text())
    loads = []
    for given in names:
        name, at, rate = given.partition("@")
        if name not in known:
            raise ChoiceError(f"--loads names {name!r}; expected some of {', '.join(known)}")
        entry = dict(known[name])
        rates = entry.pop("rates")
        loads += [Load(name, **entry, rate=each) for each in ([parse_rate(rate)] if at else rates)]
    return [replace(each, repeat=loads[:at].count(each)) for at, each in enumerate(loads)]


def parse_rate(text: str) -> float | None:
    """Requests a second; None for ``unlimited``."""
    if text == "unlimited":
        return None
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise ChoiceError(f"--loads holds the rate {text!r}; expected a number, or unlimited")
    return int(rate) if rate.is_integer() else rate


def drive(url: str, load: Load, vocabulary: int, start: float, numbers: Sequence[int]) -> Replayed:
    """Send some of a load's requests at their times; `start` is on :func:`time.time`'s clock."""
    due = load.arrivals()
    requests = tuple(
        Request(f"request {at}", partial(load.prompt, at, vocabulary), load.gen, at=due[at])
        for at in numbers
    )

    async def send() -> Replayed:
        async with client_of(url, seconds=900.0) as client:
            await asyncio.sleep(start - time.time())
            return await replay(Workload(load.name, "", (), requests), client)

    return asyncio.run(send())


def measure(url: str, load: Load, vocabulary: int, clients: int) -> Replayed:
    """What all client processes saw of one load on one server."""
    warm = replace(load, name=f"{load.seed} before", requests=WARM_UPS, rate=None)
    drive(url, warm, vocabulary, time.time(), range(WARM_UPS))
    shares = [range(load.requests)[at::clients] for at in range(min(clients, load.requests))]
    start = time.time() + HEAD_START
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(shares), mp_context=spawn) as processes:
        send = partial(drive, url, load, vocabulary, start)
        runs = list(processes.map(send, shares))
    outcomes = chain.from_iterable(run.outcomes for run in runs)
    return Replayed(tuple(outcomes), max(run.seconds for run in runs))


def figures_of(url: str, load: Load, vocabulary: int, clients: int) -> dict[str, Any]:
    run = measure(url, load, vocabulary, clients)
    seen, answers = Figures.of(run), run.answers.values()
    lost = [o for o in run.outcomes if o.status != ANSWERED]
    failures = [f"{o.name}: {o.status}: {o.detail}"[:300] for o in lost]
    tokens = sum(len(answer.arrivals) for answer in answers)
    if tokens != load.gen * len(answers):
        failures.append(f"{len(answers)} answers hold {tokens} tokens")
    rate = seen.tokens_a_second
    return {
        "load": load.name,
        "rate": load.rate,
        "requests": load.requests,
        "duration_s": round(run.seconds, 3),
        "ttft_ms": seen.ttft_ms and seen.ttft_ms._asdict(),
        "itl_ms": seen.gap_ms and seen.gap_ms._asdict(),
        "tpot_ms": seen.tpot_ms and seen.tpot_ms.mean,
        "output_tokens_per_s": rate and round(rate, 1),
        "failures": len(failures),
        "first_failures": failures[:3],
    }


def goodput_of(figures: Any, url: str, load: Load, *rest: int, bound_ms: float) -> Any:
    """The row of the highest rate that holds the bound, or of the lowest that was tried."""
    search, rows = GoodputSearch(load.rate or 1.0, bound_ms), {}
    while (rate := search.next_rate()) is not None:
        lasting = max(load.requests, round(rate * GOODPUT_SECONDS))
        tried = replace(load, rate=rate, requests=lasting)
        row = rows[rate] = figures(url, tried, *rest)
        search.tell(rate, None if row["failures"] else (row["itl_ms"] or {}).get("p99"))
    found = search.found()
    return rows.get(found.rate, rows[min(rows)]) | {"goodput": asdict(found)}


def load(
    host_args: HostArguments = None,
    host: HostOption = None,
    backends: Annotated[
        str | None,
        typer.Option(metavar="NAME[,NAME…]", help="Default: the plugin and the host's own."),
    ] = None,
    loads: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[@RATE][,…]",
            help="Of benchmarks/loads.json, at one rate (requests a second, or unlimited) or at "
            "all of its rates; default: all but tiny.",
        ),
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="GPU[,GPU…]",
            help="One GPU for each backend: all servers run, and take each load, at the same time; "
            "those on one GPU in turn.",
        ),
    ] = None,
    goodput: Annotated[
        bool,
        typer.Option(
            "--goodput",
            help="Find the highest rate of each load, from its first one on, at which the 99th "
            "percentile between tokens stays below --bound-ms.",
        ),
    ] = False,
    bound_ms: Annotated[
        float, typer.Option(min=0.001, help="Milliseconds between tokens for --goodput.")
    ] = BOUND_MS,
    clients: Annotated[
        int,
        typer.Option(min=0, help="Our client's processes for each server; 0: the host's client."),
    ] = 4,
    shape: ShapeOption = None,
    layers: LayersOption = None,
    checkpoint: CheckpointOption = None,
    tp: TpOption = 1,
    policy: Annotated[str | None, typer.Option(help="The plugin's policy.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="JSON file; default: reports/load-HOST-GPU.json.")
    ] = None,
    start_timeout: StartOption = 500.0,
) -> None:
    """Time between tokens of servers under load, with dummy weights.

    Exits with 1 if a server was lost or a request failed.
    """
    console = Console()
    chosen = HOSTS[chosen_host(host, needed=False)]
    on_gpu = chosen.on_gpu()
    entries = json.loads(LOADS.read_text()).items()
    known = [n for n, entry in entries if on_gpu == (n != "tiny") and "turns" not in entry]
    with reported(*ERRORS), ExitStack() as opened:
        own = f"{chosen.ours},{chosen.reference()}"
        names = checked_backends(chosen, listed(backends or own))
        table = read_loads(listed(loads) if loads else known)
        check_loads(chosen.name, table, by_host=not clients)
        if goodput:  # one search for each load
            table = list({each.name: each for each in reversed(table)}.values())[::-1]
        places = listed(gpus) if gpus else []
        if places and len(places) != len(names):
            raise ChoiceError(f"--gpus names {len(places)} GPUs for {len(names)} backends")
        choice = ModelChoice(None, shape, "dummy", layers, checkpoint)
        launch = Launch(
            chosen,
            opened.enter_context(served_model(chosen, choice)),
            tuple(host_arguments(host_args)),
            tensor_parallel=tp,
            policy=policy_for(policy, chosen, names),
            start_seconds=start_timeout,
        )
        checked_ranks(launch)
        came_from = provenance()
        device = str(came_from["device"]).removeprefix("NVIDIA ").split()[0].lower().strip(":")
        path = out or Path("reports") / f"load-{chosen.name}-{device}.json"
        make_folder(path)
        figures, client = figures_of, f"{CLIENT}, {clients} processes"
        if not clients:
            about = chosen.name, launch.model.path, WARM_UPS, path.with_suffix(".logs")
            figures, client = partial(figures_by_host, *about), "the host's own"
        header = {
            **came_from,
            "driver": driver(),
            "command": typed_command(),
            "model": launch.model.name,
            "options": launch.label,
            "together": len(set(places)) > 1,
            "client": client,
        }
        rows: list[dict[str, Any]] = []

        def record(row: dict[str, Any]) -> None:
            rows.append(row)
            # With --gpus, servers end their loads in any order.
            rows.sort(key=lambda each: names.index(each["backend"]))
            write_rows(path, rows, header)

        with unwound(console, f"all servers have ended; {path} holds the loads that ended before"):
            measured = partial(goodput_of, figures, bound_ms=bound_ms) if goodput else figures
            _measure_all(launch, names, places, table, clients, path, console, measured, record)
    say(console, f"rows    {path}")
    if len(rows) < len(names) * len(table) or any(row["failures"] for row in rows):
        raise typer.Exit(1)


def _measure_all(
    launch: Launch,
    backends: Sequence[str],
    gpus: Sequence[str],
    loads: Sequence[Load],
    clients: int,
    path: Path,
    console: Console,
    measured: Callable[..., dict[str, Any]],
    record: Callable[[dict[str, Any]], None],
) -> None:
    """Record the rows of every backend, by load; a server that is lost has no further rows."""
    recording = Lock()
    turns = {gpu: Lock() for gpu in {*gpus, None}}

    def one(backend: str, gpu: str | None) -> None:
        placing = {} if gpu is None else {"CUDA_VISIBLE_DEVICES": gpu}
        placed = replace(launch, environment={**launch.environment, **placing})
        try:
            with server_of(placed, backend, path.with_suffix(".logs"), say_line) as server:
                for load in loads:
                    with turns[gpu]:
                        figures = measured(server.url, load, launch.model.ids, clients)
                    asyncio.run(_confirm(server))
                    row = {"host": launch.host.name, "backend": backend, **figures}
                    with recording:
                        record(row)
                    say_line(json.dumps(row))
        except LOST as error:
            say_line(f"{backend}: {error}")

    say_line = partial(say, console)
    if not gpus:
        for backend in backends:
            one(backend, None)
    else:
        with ThreadPoolExecutor(len(backends)) as threads:
            list(threads.map(one, backends, gpus))


async def _confirm(server: Any) -> None:
    async with client_of(server.url) as client:
        await confirm_alive(server, client)
