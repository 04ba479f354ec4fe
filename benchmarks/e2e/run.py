"""A run: one server after the other, or all at once and in turn. Rows are written at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.e2e.answers import LIKELIEST, compare
from benchmarks.e2e.launch import Launch
from benchmarks.e2e.pair import Progress, ServerPair, at_once, sglang_pair
from benchmarks.e2e.rows import (
    Row,
    case_name,
    case_of,
    joined,
    make_row,
    read_rows,
    replaced,
    side_of,
)
from benchmarks.e2e.timing import measure, prompts_of
from benchmarks.e2e.workloads import BATCHES, Job
from benchmarks.row_files import driver, make_folder, write_rows
from deft_backend.files.folders import state_directory
from deft_backend.files.provenance import provenance
from deft_backend.settings.config import Settings
from deft_backend.telemetry.counters import Counters
from deft_backend.tools.harness.answers import Answer
from deft_backend.tools.harness.client import ServerClient, ServerError
from deft_backend.tools.harness.server_counters import ServerCounters
from deft_backend.tools.servers.command import StartError
from deft_backend.tools.servers.driver_stub import DriverStubError
from deft_backend.tools.servers.process import ServerProcess

REQUESTS, TOKENS = 16, 32
"""Answers and tokens of a case that are compared: enough to distinguish noise from error."""

Say = Callable[[str], None]

Served = ServerProcess | ServerPair


class ServerHung(RuntimeError):
    """A workload did not end in time, so its server was ended."""


LOST = (StartError, DriverStubError, ServerError, ServerHung)
"""A server that did not start, died or hung."""


@asynccontextmanager
async def client_of(url: str, **options: Any) -> AsyncIterator[ServerClient]:
    """The harness's client, which asks for the model that the server lists."""
    async with ServerClient(url, **options) as client:
        client.model = client.model or str((await client.models())[0]["id"])
        yield client


@contextmanager
def server_of(launch: Launch, backend: str, logs: Path, say: Say, **more: Any) -> Iterator[Any]:
    """A running server of a backend."""
    policy = launch.policy_of(backend)
    name = backend if policy is None else f"{backend}-{policy}"
    log = logs / f"{launch.host.name}-{name}.log"
    say(f"{name}: starting the server; its log is {log}")
    command = launch.command(backend)
    began = time.perf_counter()
    more["timeout"] = launch.start_seconds
    with (
        ServerPair(sglang_pair(command, launch.tensor_parallel), log, **more)
        if launch.disaggregated
        else ServerProcess(command, log, **more)
    ) as server:
        say(f"{name}: ready after {time.perf_counter() - began:.1f} s: {server.command.shell()}")
        yield server


@dataclass
class Side:
    """One backend of a run: its server while it runs, and why it was lost."""

    launch: Launch
    backend: str
    server: Served | None = None
    lost: Exception | None = None

    def running(self) -> Any:
        """The server; raises why it was lost."""
        if self.lost is not None:
            raise self.lost
        return self.server

    def row(self, job: Job) -> Row:
        """The job's row, without figures."""
        sizes = {} if job.sizes is None else {**job.sizes._asdict(), "gen": job.gen}
        policy, tp = self.launch.policy_of(self.backend), self.launch.tensor_parallel
        model, options = self.launch.model.name, self.launch.label
        names = (job.name, self.launch.host.name, self.backend, model, options)
        return make_row(*names, **sizes, tp=tp, policy=policy)


@dataclass
class Recorder:
    """The rows so far and their file; answers of this run, which are compared.

    Raises RowsError if the file holds rows of another machine or build, or cannot be written.
    """

    path: Path
    command: str
    sides: Sequence[Side]
    reference: str

    def __post_init__(self) -> None:
        make_folder(self.path)
        came_from = provenance()
        runs = [
            {
                "date": came_from["date"],
                "command": self.command,
                "backends": [side.backend],
                "model": side.launch.model.name,
                "options": side.launch.label,
                "policy": side.launch.policy_of(side.backend),
            }
            for side in self.sides
        ]
        self.header: dict[str, Any] = {**came_from, "driver": driver(), "runs": runs}
        self.rows: list[Row] = []
        self.answers: dict[tuple[object, ...], list[Answer]] = {}
        if self.path.is_file():
            self.rows, before = read_rows(self.path)
            self.header = joined(self.path, self.rows, before, self.header, Path("this run"))

    def put(self, row: Row, answers: Sequence[Answer] = ()) -> None:
        """Add a row, compare its answers with the reference's, and write the file."""
        self.rows = replaced(self.rows, [row])
        case = case_of(row)
        if answers:
            self.answers[case, side_of(row)] = list(answers)
        expected = self.answers.get((case, self.reference))
        for known in self.rows:
            found = self.answers.get((case_of(known), side_of(known)))
            if case_of(known) == case and expected and found and side_of(known) != self.reference:
                agreement = compare(expected, found)
                known["detail"]["agreement"] = {"against": self.reference, **agreement}
        write_rows(self.path, self.rows, self.header)


def record(
    sides: Sequence[Side],
    jobs: Sequence[Job],
    recorder: Recorder,
    logs: Path,
    say: Say,
    *,
    together: bool,
) -> list[Row]:
    """Run every job on every side; returns all rows of the file.

    A failure becomes the ``error`` of a row. A server that does not start fails all its jobs; a
    server that dies fails the remaining ones. Servers that run together must leave each other
    their share of the GPU.
    """
    for group in [list(sides)] if together else [[side] for side in sides]:
        with ExitStack() as opened:
            start(group, logs, say, opened)
            for turn, job in enumerate(jobs):  # nobody is always first
                for side in group if turn % 2 == 0 else reversed(group):
                    _run(side, job, recorder, say)
    return recorder.rows


def start(group: Sequence[Side], logs: Path, say: Say, opened: ExitStack) -> None:
    """Start the servers of a group at the same time; sides whose server fails are lost."""

    def one(side: Side, progress: Progress) -> None:
        server = server_of(side.launch, side.backend, logs, say, progress=progress)
        try:
            side.server = opened.enter_context(server)
        except LOST as error:
            side.lost = error

    at_once([partial(one, side) for side in group])


def _run(side: Side, job: Job, recorder: Recorder, say: Say) -> None:
    """Measure a job; what goes wrong becomes the row's error."""
    row, answers = side.row(job), []
    try:
        answers = asyncio.run(_measured(side, side.running(), job, row))
    except LOST as error:
        if side.lost is None:
            side.running().stop()  # a server that hangs would slow the others down
        side.lost, row = error, side.row(job)
        row["error"] = _words(error)
    recorder.put(row, answers)
    figures = ((row["tpot_ms"], "ms a token"), (row["ttft_ms"], "ms to the first token"))
    said = [f"{value:,.3f} {name}" for value, name in figures if value is not None]
    outcome = row["error"].splitlines()[0] if row["error"] else ", ".join(said)
    say(f"{side_of(row)}: {case_name(row)}: {outcome}")


async def _measured(side: Side, server: Served, job: Job, row: Row) -> list[Answer]:
    """Fill the row; returns answers to compare, if attention changes their tokens."""
    async with client_of(server.url, seconds=580.0) as client:
        before = await asyncio.to_thread(_counters, server)
        answers: list[Answer] = []
        try:
            await asyncio.wait_for(measure(job, side.launch, client, row), job.seconds)
            if job.how == BATCHES and side.launch.model.load_format != "dummy":
                prompts = prompts_of(job.workload(side.launch.model.ids, 0))
                count = min(job.gen, TOKENS)
                answers = await client.batch(prompts, count, likeliest=LIKELIEST)
        except asyncio.TimeoutError:
            raise ServerHung(
                f"{case_name(row)} did not end within {job.seconds:.0f} s, so the server was ended"
            ) from None
        except Exception as error:
            # A server that died is the cause; report that instead.
            await confirm_alive(server, client)
            row["error"] = _words(error)
        row["detail"] |= _steps(before, await asyncio.to_thread(_counters, server))
        return answers[:REQUESTS]


async def confirm_alive(server: Served, client: ServerClient) -> None:
    """Return if the server still answers; raise StartError or ServerHung if it does not.

    A dying server drops its connections shortly before its process ends.
    """
    for _ in range(100):
        server.check_alive()
        if await client.lives():
            return
        await asyncio.sleep(0.2)
    raise ServerHung("the server runs but does not answer any more, so it was ended")


def _counters(server: Served) -> Counters | None:
    """The plugin's counters; None if it writes none in this server."""
    return ServerCounters(server.command.url, state_directory(Settings.from_env())).read()


def _steps(before: Counters | None, after: Counters | None) -> dict[str, Any]:
    """Decode steps by kernel, and the bytes of KV that they read."""
    if after is None:
        return {}
    counted = after if before is None else after - before
    names = ("plans", "kv_bytes_read", "kv_bytes_query_guided")
    steps = {"tree": counted.steps_tree, "host": dict(counted.steps_host)}
    return {"steps": steps | {name: getattr(counted, name) for name in names}}


def _words(error: Exception) -> str:
    """An error as a row holds it; the server's log has the rest."""
    said = f"{type(error).__name__}: {error}"
    return said if len(said) <= 1200 else f"{said[:400]} … {said[-800:]}"
