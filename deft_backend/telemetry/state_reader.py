"""Read the state file of a running server: its counters and its last batch."""

import os
import time
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from deft_backend.files.json_fields import mapping, number, shown, text
from deft_backend.files.private_files import open_private, read_private_json
from deft_backend.forest import PrefixForest
from deft_backend.telemetry.counters import (
    SCHEMA,
    Counters,
    Place,
    ServerDescription,
    StateName,
    process_runs,
)
from deft_backend.telemetry.shown_batch import answer_file, forest_from_json, request_file

ANSWER_SECONDS = 20.0  # longest time in which a server on a busy machine shows its batch

SETTLE_SECONDS = 0.7  # after this time the file has all counters: it is written four times a second


SILENT_SECONDS = 15.0
"""A writer without a sign of life for this long hangs, or another program has its process id."""


class StateError(ValueError):
    """There is no state file, or this version cannot read it."""


@dataclass
class StateReading(ServerDescription):
    counters: Counters
    updated: float  # when a counter last changed, in seconds since the epoch
    sign_of_life: float  # when the writer last wrote or touched the file


class StateFile(NamedTuple):
    name: StateName
    path: Path
    seen: float  # its writer's last sign of life, in seconds since the epoch

    @property
    def lives(self) -> bool:
        """Whether its writer runs. Elsewhere a process id means nothing: the file's age tells."""
        if self.name.place == Place.here():
            return process_runs(self.name.pid)
        return time.time() - self.seen < SILENT_SECONDS


def state_files(folder: Path, port: int | None = None) -> list[StateFile]:
    try:
        entries = os.listdir(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StateError(
            f"cannot read the folder of servers' state {folder}: {error.strerror or error}; set "
            "DEFT_CACHE_DIR as for the server, to a folder that you may read"
        ) from None
    found = []
    for entry in entries:
        name = StateName.parse(entry)
        if name is not None and port in (None, name.port):
            with suppress(OSError):  # it may have been deleted
                found.append(StateFile(name, folder / entry, (folder / entry).lstat().st_mtime))
    found.sort(key=_order)
    return found


def _order(file: StateFile) -> tuple[Any, ...]:
    name = file.name
    here = name.place == Place.here()
    return name.port, not file.lives, name.dp or 0, name.pp or 0, name.tp, not here, -file.seen


def running_here(folder: Path, port: int) -> Path | None:
    """The state file of the first process of the server that runs on a port of this machine."""
    here = (file for file in state_files(folder, port) if file.name.place == Place.here())
    return next((file.path for file in here if file.lives), None)


def server_file(folder: Path, port: int | None = None) -> Path:
    """The state file of the first process of a server: of the only running one, or on a port."""
    files = state_files(folder, port)
    if port is not None:
        if not files:
            raise StateError(
                f"there is no state file of a server on port {port} in {folder}; is a server with "
                "the plugin running on that port, under the same DEFT_CACHE_DIR?"
            )
        return files[0].path
    servers = {(file.name.port, file.name.place): file for file in reversed(files) if file.lives}
    if not servers:
        raise StateError(
            f"no server with the plugin is running, according to {folder}; start one with "
            "'deft serve', or set DEFT_CACHE_DIR as for the server"
        )
    if len(servers) > 1:
        ports = " or ".join(sorted({str(number) for number, _ in servers}, key=int))
        raise StateError(
            f"{len(servers)} servers with the plugin are running, according to {folder}; expected "
            f"one. Name its port: --server {ports}"
        )
    (file,) = servers.values()
    return file.path


def read_state(path: Path) -> StateReading:
    try:
        written = path.stat().st_mtime
        content = read_private_json(path)
    except FileNotFoundError:
        raise StateError(
            f"there is no state file {path}; is a server with the plugin running on that port, "
            "under the same DEFT_CACHE_DIR?"
        ) from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or f"no JSON: {error}"
        raise StateError(f"cannot read the state file {path}: {reason}") from error
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema != SCHEMA:
        raise StateError(
            f"{path} has schema {shown(schema)}; this version reads {SCHEMA}. Run the same version "
            "of deft-backend in the server and here"
        )
    try:
        described = {
            each.name: each.metadata["reader"](content, each.name)
            for each in fields(ServerDescription)
        }
        return StateReading(
            **described,
            counters=Counters.from_json(content),
            updated=number(content, "updated"),
            sign_of_life=written,
        )
    except ValueError as error:
        raise StateError(f"{path}: {error}") from error


class BatchQuestion:
    """One question to a server: which batch does it decode? One file answers all open questions."""

    def __init__(self, state: Path) -> None:
        self._state = state
        self._answered = answer_file(state)
        self._before = self._version()
        try:
            open_private(request_file(state)).close()
        except OSError as error:
            raise self._failed(error) from error

    def answer(self) -> PrefixForest | None:
        if self._version() in (self._before, None):
            return None
        try:
            content = read_private_json(self._answered)
            if "forest" in content:
                return forest_from_json(mapping(content, "forest"))
            why = text(content, "error")
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise self._failed(error) from error
        raise StateError(f"{self._state}: the server has no batch to show: {why}")

    def withdraw(self) -> None:
        with suppress(OSError):
            request_file(self._state).unlink(missing_ok=True)

    def _failed(self, error: Exception) -> StateError:
        return StateError(f"{self._state}: cannot ask the server for its last batch: {error}")

    def _version(self) -> tuple[int, int] | None:
        try:
            status = self._answered.stat()
        except OSError:
            return None
        return status.st_ino, status.st_mtime_ns


def shown_forest(state: Path) -> PrefixForest:
    question = BatchQuestion(state)
    begin = time.monotonic()
    while (forest := question.answer()) is None:
        if time.monotonic() - begin > ANSWER_SECONDS:
            question.withdraw()
            raise StateError(
                f"{state}: the server did not say within {ANSWER_SECONDS:.0f} s which batch it "
                "decodes; is it still running?"
            )
        time.sleep(0.1)
    return forest


def settled_counters(path: Path, timeout: float) -> Counters:
    """Counters of a server at rest: two readings, a pause apart, are equal. Raises StateError."""
    begin = time.monotonic()
    before: Counters | None = None
    while True:
        time.sleep(SETTLE_SECONDS)
        late = time.monotonic() - begin > timeout
        try:
            now = read_state(path).counters
        except StateError:
            if late:
                raise
            continue
        if now == before:
            return now
        if late:
            raise StateError(
                f"{path}: the counters still change {timeout:.0f} s after the last answer"
            )
        before = now
