"""Read the state file of a running server: its counters and its last forest."""

import os
import re
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deft_backend.files.json_fields import FieldError, mapping, number, shown, text, within
from deft_backend.files.private_files import open_private, read_private_json
from deft_backend.forest import PrefixForest
from deft_backend.telemetry.counters import SCHEMA, Counters, ServerDescription, read_description
from deft_backend.telemetry.shown_batch import answer_file, forest_from_json, request_file

ANSWER_SECONDS = 20.0  # longest time in which a server on a busy machine shows its batch

SETTLE_SECONDS = 0.7  # after this time the file has all counters: it is written four times a second


class StateError(ValueError):
    """There is no state file, or this version cannot read it."""


@dataclass
class StateReading(ServerDescription):
    """One reading of the file."""

    path: Path
    counters: Counters
    forest: PrefixForest | None
    rids: tuple[str, ...]  # the host's names of the requests of `forest`, by request index
    updated: float  # when a counter last changed, in seconds since the epoch
    sign_of_life: float  # when the writer last wrote or touched the file


def state_file(folder: Path, port: int) -> Path:
    """The state file of the first process of the server on `port`; a running server's, if any."""
    files = _first_ranks(folder, port)
    running = [path for path in files if _writes_on(path)]
    return next(iter(running or files), folder / f"{port}-tp0.json")


def running_servers(folder: Path) -> dict[int, Path]:
    """Ports of running servers, with the files of their first processes."""
    alive: dict[int, Path] = {}
    for path in _first_ranks(folder):
        if _writes_on(path):
            alive.setdefault(int(path.name.split("-")[0]), path)
    return alive


def only_server(folder: Path) -> Path:
    """The state file of the only running server; raises StateError if none or several run."""
    servers = running_servers(folder)
    if not servers:
        raise StateError(
            f"no server with the plugin is running, according to {folder}; start one with "
            "'deft serve', or set DEFT_STATE_DIR as for the server"
        )
    if len(servers) > 1:
        raise StateError(
            f"{len(servers)} servers with the plugin are running, according to {folder}; expected "
            f"one. Name its port: --server {' or '.join(map(str, servers))}"
        )
    (path,) = servers.values()
    return path


def _first_ranks(folder: Path, port: int | None = None) -> list[Path]:
    """State files of first tensor-parallel ranks, the first pipeline and data ranks' first."""
    name = re.compile(rf"({port or '[0-9]+'})-tp0((?:-(?:pp|dp)[0-9]+)*)\.json")
    matches = [name.fullmatch(path.name) for path in folder.glob("*.json")]
    named = [match for match in matches if match is not None]
    named.sort(key=lambda match: (int(match[1]), [int(n) for n in re.findall("[0-9]+", match[2])]))
    return [folder / match.string for match in named]


def _writes_on(path: Path) -> bool:
    """Whether the process that wrote a state file still runs."""
    try:
        return process_runs(int(read_private_json(path)["pid"]))
    except (OSError, ValueError, KeyError, TypeError):
        return False


def process_runs(pid: int) -> bool:
    """Whether a process runs; one that has ended and waits for its parent does not."""
    if pid < 1:  # 0 and below name groups of processes
        return False
    try:
        os.kill(pid, 0)
    except PermissionError:  # another user's process
        return True
    except (OSError, OverflowError):
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):  # no /proc here, or it has just ended
        return True


def read_state(path: Path) -> StateReading:
    """Read a state file; raises StateError if it is missing, of another schema, or damaged."""
    try:
        written = path.stat().st_mtime
        content = read_private_json(path)
    except FileNotFoundError:
        raise StateError(
            f"there is no state file {path}; is a server with the plugin running on that port, "
            "under the same DEFT_STATE_DIR?"
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
        return _state(path, content, written)
    except ValueError as error:
        raise StateError(f"{path}: {error}") from error


class BatchQuestion:
    """One question to a server with the device planner: which batch does it decode?

    The server answers all open questions with one file, so no asker removes it.

    Raises StateError if the file with the question cannot be written next to the state file.
    """

    def __init__(self, state: Path) -> None:
        self._state = state
        self._answered = answer_file(state)
        self._before = self._version()
        try:
            open_private(request_file(state)).close()
        except OSError as error:
            raise self._failed(error) from error

    def answer(self) -> PrefixForest | None:
        """The batch, or None until the server has answered.

        Raises StateError if the server has no batch to show, or the answer cannot be read.
        """
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
        """Take the question back, so that the server copies nothing for it."""
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
    """Ask a server with the device planner for its last batch.

    Raises StateError if the server does not answer in time, or has no batch to show.
    """
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


def settled_counters(path: Path, timeout: float = 10.0) -> Counters:
    """Counters of a server at rest: two readings, a pause apart, are equal.

    Raises StateError if the file stays unreadable, or the counters still move after `timeout`
    seconds.
    """
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


def _state(path: Path, content: dict[str, Any], written: float) -> StateReading:
    forest, rids = None, []
    if content.get("forest", "") is not None:
        shown_batch = mapping(content, "forest")
        rids = shown_batch.get("rids", [])
        if not isinstance(rids, list) or not all(isinstance(rid, str) for rid in rids):
            raise FieldError(f"rids is {shown(rids)}; expected a list of texts")
        with within("forest"):
            forest = forest_from_json(shown_batch)
    return StateReading(
        path=path,
        **read_description(content),
        counters=Counters.from_json(content),
        forest=forest,
        rids=tuple(rids),
        updated=number(content, "updated"),
        sign_of_life=written,
    )
