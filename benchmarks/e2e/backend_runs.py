"""A run: one server after the other, or all at once and in turn. Rows are written at once."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

from benchmarks.e2e.backends import Launch
from benchmarks.e2e.checked_answers import still_to_run
from benchmarks.e2e.counted_server import CountedServer
from benchmarks.e2e.kept_answers import compare, kept
from benchmarks.e2e.plain_check import PLAIN
from benchmarks.e2e.served_workloads import Mixed, Served, Workload, answers_file
from benchmarks.e2e.serving_rows import (
    Row,
    case_name,
    case_of,
    joined,
    read_rows,
    replaced,
    side_of,
)
from benchmarks.row_files import make_folder, write_rows
from benchmarks.token_client.client import Client, ClientError
from deft_backend.files.provenance import driver, provenance
from deft_backend.telemetry.counters import Counters
from deft_backend.telemetry.state_reader import StateError
from deft_backend.tools.servers.command import ServerCommand, StartError
from deft_backend.tools.servers.driver_stub import DriverStubError
from deft_backend.tools.servers.process import ServerProcess

_MOST_ERROR = 600
"""Characters of an error in a row; the server's log has the rest."""


@dataclass(frozen=True)
class Setup:
    """The measurements of a run, and its output file.

    Attributes
    ----------
    launch : Launch
        The servers' start options.
    backends : tuple of str
        The plugin's runs first, in any order: others check its answers.
    reference : str
        The backend whose answers the others' are compared with.
    workloads : sequence of Workload
    out : Path
        File of rows; an existing file is added to.
    logs : Path
        Folder of the servers' logs.
    command : str
        The command as the user typed it, for the header.
    start_seconds : float
        Time limit for a server's start.
    """

    launch: Launch
    backends: tuple[str, ...]
    reference: str
    workloads: Sequence[Workload]
    out: Path
    logs: Path
    command: str
    start_seconds: float = 500.0


class ServerHung(RuntimeError):
    """A workload did not end in time, so its server was ended."""


_LOST = (StartError, DriverStubError, ClientError, ServerHung)
"""A server that did not start, died or hung."""


class Recorder:
    """The rows so far, and their file, which all setups share.

    Raises
    ------
    RowsError
        If the file holds rows of another machine or build, or cannot be written.
    """

    def __init__(self, setups: Sequence[Setup]) -> None:
        setup = setups[0]
        self.path = setup.out
        make_folder(self.path)
        self.answers = setup.out.with_suffix(".answers")
        came_from = provenance()
        runs = [
            {
                "date": came_from["date"], "command": each.command,
                "backends": list(each.backends), "model": each.launch.model.name,
                "options": each.launch.label, "policy": each.launch.policy,
            }
            for each in setups
        ]  # fmt: skip
        self.header: dict[str, Any] = {**came_from, "driver": driver(), "runs": runs}
        self.rows: list[Row] = []
        if self.path.is_file():
            self.rows, before = read_rows(self.path)
            self.header = joined(self.path, self.rows, before, self.header, Path("this run"))
        else:  # answers without rows belong to another run
            shutil.rmtree(self.answers, ignore_errors=True)
        self._reference = setup.reference

    def put(self, row: Row, launch: Launch) -> None:
        """Add a row, compare its answers with the reference's, and write the file."""
        row["policy"] = launch.policy_of(row["backend"])
        self.rows = replaced(self.rows, [row])
        for known in self.rows:
            if case_of(known) != case_of(row):
                continue
            theirs = kept(answers_file(self.answers, known, self._reference))
            ours = kept(answers_file(self.answers, known, known["backend"], known["policy"]))
            if theirs and ours and known["backend"] != self._reference and not known["error"]:
                found = compare(theirs, ours)
                known["detail"]["agreement"] = {"against": self._reference, **found}
        write_rows(self.path, self.rows, self.header)


def record(setup: Setup, said: Callable[[str], None]) -> list[Row]:
    """Run every workload on every backend; returns all rows of the file.

    A failure becomes the ``error`` of a row. A server that does not start fails all its workloads;
    a server that dies fails the remaining ones.

    Parameters
    ----------
    setup : Setup
    said : callable
        Called with each line of progress.

    Raises
    ------
    RowsError
        If the rows cannot be added to `setup.out`.
    """
    recorder = Recorder([setup])
    for backend in _in_order(setup):
        (_check_plainly if backend == PLAIN else _serve)(setup, backend, recorder, said)
    _say_left(setup, recorder, said)
    return recorder.rows


def record_together(setups: Sequence[Setup], said: Callable[[str], None]) -> list[Row]:
    """Start the servers of all setups at once, and run each workload on one after the other.

    Each server must leave the others their share of the GPU. The setups have the same workloads
    and file of rows. Failures, errors and the result are those of :func:`record`.
    """
    recorder = Recorder(setups)
    sides = [(setup, backend) for setup in setups for backend in _in_order(setup)]
    lost: dict[int, Exception] = {}
    interrupted = Event()

    def wait(seconds: float) -> None:
        if interrupted.is_set():
            raise StartError("the start was interrupted")

    with ExitStack() as opened, ThreadPoolExecutor(len(sides)) as threads:

        def start(at: int) -> CountedServer | None:
            began = time.perf_counter()
            setup, backend = sides[at]
            try:
                server = opened.enter_context(_server(setup, backend, said, lambda _: wait))
            except _LOST as error:
                lost[at] = error
                return None
            said(f"{_side(setup, backend)}: ready after {time.perf_counter() - began:.1f} s")
            return server

        try:
            starts = [threads.submit(start, at) for at in range(len(sides))]
            for ended in as_completed(starts):
                ended.result()  # an error that is no row's ends the other starts, too
            servers = [ended.result() for ended in starts]
        except BaseException:
            interrupted.set()  # or the threads would wait for their servers
            raise
        for turn, workload in enumerate(setups[0].workloads):
            order = range(len(sides))
            # Others check the plugin's answers to mixed traffic. Else nobody is always first.
            for at in order if turn % 2 == 0 or isinstance(workload, Mixed) else reversed(order):
                (setup, backend), server = sides[at], servers[at]
                pending = [workload]
                if server is not None and at not in lost:
                    try:
                        asyncio.run(_measure(setup, backend, server, pending, recorder, said))
                    except _LOST as error:
                        lost[at] = error
                        server.process.stop()  # a server that hangs would slow the others down
                if at in lost:
                    _lose(setup, backend, pending, lost[at], recorder, said)
    for setup in setups:
        _say_left(setup, recorder, said)
    return recorder.rows


def _say_left(setup: Setup, recorder: Recorder, said: Callable[[str], None]) -> None:
    """Say which of the plugin's answers the run has not checked."""
    ours = setup.launch.host.ours
    run = {case_of(workload.row(setup.launch, ours)) for workload in setup.workloads}
    for row in recorder.rows:
        if row["backend"] == ours and case_of(row) in run and (left := still_to_run(row)):
            said(f"{ours}: {case_name(row)}: {left}")


def _in_order(setup: Setup) -> list[str]:
    return sorted(setup.backends, key=lambda name: name != setup.launch.host.ours)


def _side(setup: Setup, backend: str) -> str:
    policy = setup.launch.policy_of(backend)
    return backend if policy is None else f"{backend}-{policy}"


def _server(
    setup: Setup,
    backend: str,
    said: Callable[[str], None],
    on_start: Callable[[ServerCommand], Callable[[float], None]] | None = None,
) -> CountedServer:
    name = _side(setup, backend)
    log = setup.logs / f"{setup.launch.host.name}-{name}.log"
    said(f"{name}: starting the server; its log is {log}")
    return CountedServer(
        partial(setup.launch.command, backend), log, timeout=setup.start_seconds, on_start=on_start
    )


def _serve(setup: Setup, backend: str, recorder: Recorder, said: Callable[[str], None]) -> None:
    pending = list(setup.workloads)
    try:
        with _server(setup, backend, said) as server:
            said(f"{backend}: {server.command.shell()}")
            asyncio.run(_measure(setup, backend, server, pending, recorder, said))
    except _LOST as error:
        _lose(setup, backend, pending, error, recorder, said)


def _lose(
    setup: Setup, backend: str, pending: Sequence[Workload], error: Exception, recorder: Recorder,
    said: Callable[[str], None],
) -> None:  # fmt: skip
    """Put the error into the rows of the workloads that a lost server leaves."""
    for workload in pending:
        row = _failed(workload.row(setup.launch, backend), error)
        recorder.put(row, setup.launch)
        said(_line(row))


def _check_plainly(
    setup: Setup, backend: str, recorder: Recorder, said: Callable[[str], None]
) -> None:
    """Check answers without a server."""
    said(f"{backend}: checking answers with a model in plain PyTorch")
    for workload in setup.workloads:
        try:
            assert isinstance(workload, Mixed), workload
            row = workload.check_plainly(setup.launch, recorder.answers, recorder.rows)
        except Exception as error:
            row = _failed(workload.row(setup.launch, backend), error)
        recorder.put(row, setup.launch)
        said(_line(row))


async def _measure(
    setup: Setup,
    backend: str,
    server: CountedServer,
    pending: list[Workload],
    recorder: Recorder,
    said: Callable[[str], None],
) -> None:
    """Run the pending workloads and take each off the list when it is done."""
    async with Client(server.url, setup.launch.host.name) as client:
        served = Served(
            setup.launch, backend, setup.reference, server.process, client,
            server.command.environment, recorder.answers,
        )  # fmt: skip
        while pending:
            workload = pending[0]
            before = await asyncio.to_thread(_counters, server)
            try:
                limit = workload.seconds
                row = await asyncio.wait_for(workload.run(served, recorder.rows), limit)
            except asyncio.TimeoutError:
                name = case_name(workload.row(setup.launch, backend))
                raise ServerHung(
                    f"{name} did not end within {workload.seconds:.0f} s, so the server was ended"
                ) from None
            except Exception as error:
                # A server that died is the cause; report that instead.
                await _confirm_alive(server.process, client)
                row = _failed(workload.row(setup.launch, backend), error)
            pending.pop(0)
            if row is None:
                continue
            if row["backend"] == backend:
                row["detail"] |= _steps(before, await asyncio.to_thread(_counters, server))
            recorder.put(row, setup.launch)
            said(_line(row))


async def _confirm_alive(server: ServerProcess, client: Client) -> None:
    """Return if the server still answers.

    A dying server drops its connections shortly before its process ends.

    Raises
    ------
    StartError
        If the server has ended.
    ServerHung
        If the server runs and does not answer.
    """
    for _ in range(100):
        server.check_alive()
        try:
            await client.get("/v1/models")
            return
        except ClientError:
            await asyncio.sleep(0.2)
    raise ServerHung("the server runs but does not answer any more, so it was ended")


def _counters(server: CountedServer) -> Counters | None:
    """The plugin's counters; None if it writes none in this server, or they cannot be read."""
    try:
        return server.counters()
    except StateError:
        return None


def _steps(before: Counters | None, after: Counters | None) -> dict[str, Any]:
    """Decode steps by kernel, and the bytes of KV that they read."""
    if after is None:
        return {}
    counted = after if before is None else after - before
    return {
        "steps": {
            "tree": counted.steps_tree, "host": dict(counted.steps_host), "plans": counted.plans,
            "kv_bytes_read": counted.kv_bytes_read,
            "kv_bytes_query_guided": counted.kv_bytes_query_guided,
        }
    }  # fmt: skip


def _failed(row: Row, error: Exception) -> Row:
    row["error"] = f"{type(error).__name__}: {error}"[:_MOST_ERROR]
    return row


def _line(row: Row) -> str:
    if row["error"]:
        return f"{side_of(row)}: {case_name(row)}: {row['error'].splitlines()[0]}"
    figures = ", ".join(
        f"{name} {value:,.3f}"
        for name, value in (
            ("ms a token", row["tpot_ms"]), ("TTFT ms", row["ttft_ms"]),
            ("tokens/s", row["tokens_per_s"]),
        )
        if value is not None
    )  # fmt: skip
    return f"{side_of(row)}: {case_name(row)}: {figures}"
