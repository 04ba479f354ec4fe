"""A run: one server after the other, every workload on each. Rows are written at once."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.e2e.backends import Launch
from benchmarks.e2e.checked_answers import still_to_run
from benchmarks.e2e.counted_server import CountedServer
from benchmarks.e2e.kept_answers import compare, kept
from benchmarks.e2e.plain_check import PLAIN
from benchmarks.e2e.served_workloads import Mixed, Served, Workload, answers_file
from benchmarks.e2e.serving_rows import Row, case_name, case_of, joined, read_rows, replaced
from benchmarks.row_files import make_folder, write_rows
from benchmarks.token_client.client import Client, ClientError
from deft_backend.files.provenance import driver, provenance
from deft_backend.telemetry.counters import Counters
from deft_backend.telemetry.state_reader import StateError
from deft_backend.tools.servers.command import StartError
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


class Recorder:
    """The rows so far, and their file.

    Raises
    ------
    RowsError
        If the file holds rows of another machine or build, or cannot be written.
    """

    def __init__(self, setup: Setup) -> None:
        self.path = setup.out
        make_folder(self.path)
        self.answers = setup.out.with_suffix(".answers")
        came_from = provenance()
        run = {
            "date": came_from["date"], "command": setup.command,
            "backends": list(setup.backends), "model": setup.launch.model.name,
            "options": setup.launch.label, "policy": setup.launch.policy,
        }  # fmt: skip
        self.header: dict[str, Any] = {**came_from, "driver": driver(), "runs": [run]}
        self.rows: list[Row] = []
        if self.path.is_file():
            self.rows, before = read_rows(self.path)
            self.header = joined(self.path, self.rows, before, self.header, Path("this run"))
        else:  # answers without rows belong to another run
            shutil.rmtree(self.answers, ignore_errors=True)
        self._reference, self._launch = setup.reference, setup.launch

    def put(self, row: Row) -> None:
        """Add a row, compare its answers with the reference's, and write the file."""
        row["policy"] = self._launch.policy_of(row["backend"])
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
    recorder = Recorder(setup)
    ours = setup.launch.host.ours
    for backend in sorted(setup.backends, key=lambda name: name != ours):
        (_check_plainly if backend == PLAIN else _serve)(setup, backend, recorder, said)
    run = {case_of(workload.row(setup.launch, ours)) for workload in setup.workloads}
    for row in recorder.rows:
        if row["backend"] == ours and case_of(row) in run and (left := still_to_run(row)):
            said(f"{ours}: {case_name(row)}: {left}")
    return recorder.rows


def _serve(setup: Setup, backend: str, recorder: Recorder, said: Callable[[str], None]) -> None:
    pending = list(setup.workloads)
    log = setup.logs / f"{setup.launch.host.name}-{backend}.log"
    said(f"{backend}: starting the server; its log is {log}")
    try:
        with CountedServer(
            partial(setup.launch.command, backend), log, timeout=setup.start_seconds
        ) as server:
            said(f"{backend}: {server.command.shell()}")
            asyncio.run(_measure(setup, backend, server, pending, recorder, said))
    except (StartError, DriverStubError, ClientError, ServerHung) as error:
        for workload in pending:
            row = _failed(workload.row(setup.launch, backend), error)
            recorder.put(row)
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
        recorder.put(row)
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
            recorder.put(row)
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
        return f"{row['backend']}: {case_name(row)}: {row['error'].splitlines()[0]}"
    figures = ", ".join(
        f"{name} {value:,.3f}"
        for name, value in (
            ("ms a token", row["tpot_ms"]), ("TTFT ms", row["ttft_ms"]),
            ("tokens/s", row["tokens_per_s"]),
        )
        if value is not None
    )  # fmt: skip
    return f"{row['backend']}: {case_name(row)}: {figures}"
