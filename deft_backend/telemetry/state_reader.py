"""Read the state file of a running server: its counters and its last forest."""

from __future__ import annotations

import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deft_backend.forest import PrefixForest
from deft_backend.telemetry.counters import SCHEMA
from deft_backend.telemetry.counters import Counters as Counters
from deft_backend.telemetry.forest_json import forest_from_json
from deft_backend.telemetry.shown_batch import answer_file, request_file

ANSWER_SECONDS = 20.0
"""Longest time in which a server on a busy machine shows its batch."""

SETTLE_SECONDS = 0.7
"""The plugin writes every quarter second, so after this time the file has all counters."""

_SHAPE = ("num_layers", "num_query_heads", "num_kv_heads", "head_dim", "dtype_bytes")


class StateError(ValueError):
    """There is no state file, or this version cannot read it."""


@dataclass(frozen=True)
class StateReading:
    """One reading of the file."""

    path: Path
    backend: str
    policy: str
    device: str
    dtype: str
    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int
    counters: Counters
    forest: PrefixForest | None
    updated: float


def state_file(folder: Path, port: int) -> Path:
    """The state file of the first process of the server on `port`.

    The function returns the file of an ended server only if no running server has one.
    """
    found = _first_ranks(folder, port)
    running = [path for path in found if _writes_on(path)]
    return next(iter(running or found), folder / f"{port}-tp0.json")


def running_servers(folder: Path) -> dict[int, Path]:
    """Ports of running servers, with the files of their first processes."""
    alive: dict[int, Path] = {}
    for path in _first_ranks(folder):
        if _writes_on(path):
            alive.setdefault(int(path.name.split("-")[0]), path)
    return alive


def _first_ranks(folder: Path, port: int | None = None) -> list[Path]:
    """State files of first tensor-parallel ranks, the first pipeline and data ranks' first."""
    name = re.compile(rf"({port or '[0-9]+'})-tp0((?:-(?:pp|dp)[0-9]+)*)\.json")
    matches = [name.fullmatch(path.name) for path in folder.glob("*.json")]
    found = [match for match in matches if match is not None]
    found.sort(key=lambda match: (int(match[1]), [int(n) for n in re.findall("[0-9]+", match[2])]))
    return [folder / match.string for match in found]


def _writes_on(path: Path) -> bool:
    """Whether the process that wrote a state file still runs."""
    try:
        os.kill(int(json.loads(path.read_text())["pid"]), 0)
    except PermissionError:  # another user's process, but alive
        return True
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return True


def read_state(path: Path) -> StateReading:
    """Read and check a state file.

    Raises
    ------
    StateError
        If the file is missing, has another schema, or lacks a field.
    """
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise StateError(
            f"there is no state file {path}; is a server with the plugin running on that port, "
            "under the same DEFT_STATE_DIR?"
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise StateError(f"cannot read the state file {path}: {error}") from error
    if not isinstance(content, dict) or content.get("schema") != SCHEMA:
        found = content.get("schema") if isinstance(content, dict) else None
        raise StateError(
            f"{path} has schema {found!r}; this version reads {SCHEMA}. Run the same version of "
            "deft-backend in the server and here"
        )
    try:
        return _state(path, content)
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"{path}: bad or missing field: {error!r}") from error


def shown_forest(state: Path, timeout: float | None = None) -> PrefixForest:
    """Ask a server with the device planner for its last batch.

    Parameters
    ----------
    timeout : float, optional
        Seconds to wait; default: :data:`ANSWER_SECONDS`.

    Raises
    ------
    StateError
        If the server does not answer in time, or has no batch to show.
    """
    timeout = ANSWER_SECONDS if timeout is None else timeout
    asked, answered = request_file(state), answer_file(state)
    try:
        answered.unlink(missing_ok=True)
        asked.touch()
        if not appears(answered, timeout):
            asked.unlink(missing_ok=True)
            raise StateError(
                f"{state}: the server did not say within {timeout:.0f} s which batch it decodes; "
                "is it still running?"
            )
        content = json.loads(answered.read_text())
        answered.unlink(missing_ok=True)
    except (OSError, json.JSONDecodeError) as error:
        raise StateError(f"{state}: cannot ask the server for its last batch: {error}") from error
    if "forest" not in content:
        raise StateError(f"{state}: the server has no batch to show: {content.get('error')}")
    return forest_from_json(content["forest"])


def written_state(folder: Path, port: int, timeout: float = 5.0) -> Path | None:
    """Wait for the server's state file; None if there is none in time."""
    begin = time.monotonic()
    while not (path := state_file(folder, port)).is_file():
        if time.monotonic() - begin > timeout:
            return None
        time.sleep(0.1)
    return path


def appears(path: Path, timeout: float = 5.0) -> bool:
    """Wait for a file; False if there is none in time. A server can answer before it writes."""
    begin = time.monotonic()
    while not path.is_file():
        if time.monotonic() - begin > timeout:
            return False
        time.sleep(0.1)
    return True


def settled_counters(path: Path, timeout: float = 10.0) -> Counters:
    """Counters of a server at rest: two readings, a pause apart, are equal.

    Raises
    ------
    StateError
        If the file stays unreadable, or the counters still move after `timeout` seconds.
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
            raise StateError(f"{path}: the counters move {timeout:.0f} s after the last answer")
        before = now


def _state(path: Path, content: dict[str, Any]) -> StateReading:
    forest = content["forest"]
    return StateReading(
        path=path,
        backend=str(content["backend"]),
        policy=str(content["policy"]),
        device=str(content["device"]),
        dtype=str(content["dtype"]),
        **{name: int(content[name]) for name in _SHAPE},
        counters=Counters.from_json(content),
        forest=None if forest is None else forest_from_json(forest),
        updated=float(content["updated"]),
    )
