"""The engines that decode on this machine, and what each of them is doing."""

import re
import time
from dataclasses import dataclass, replace
from pathlib import Path

from deft_backend.telemetry.counters import Counters
from deft_backend.telemetry.state_reader import StateError, StateReading, process_runs, read_state

DECODING, IDLE, SILENT, ENDED, UNREADABLE = "decoding", "idle", "silent", "ended", "unreadable"

IDLE_SECONDS = 5.0
"""An engine without a decode step for this long is idle. Its writer looks four times a second."""

SILENT_SECONDS = 15.0
"""A writer without a sign of life for this long hangs, or another program has its process id."""

_NAME = re.compile(
    r"(?P<port>[0-9]+)-tp(?P<tp>[0-9]+)(?:-pp(?P<pp>[0-9]+))?(?:-dp(?P<dp>[0-9]+))?\.json"
)


@dataclass(frozen=True)
class Engine:
    """The processes of a server that decode one batch together."""

    port: int
    dp: int | None  # its data-parallel rank; None if the server has one engine
    path: Path  # the state file of its first process
    status: str  # one of the names above
    # Seconds since its last decode step, or since the first reading of a server that did none.
    since: float
    reading: StateReading | None  # of its first process; None if it is unreadable
    counters: Counters  # steps of the first process; bytes of all its processes
    processes: int
    problem: str = ""  # why it is unreadable

    @property
    def name(self) -> str:
        """The port, with the data-parallel rank if there are several."""
        return f"{self.port}" if self.dp is None else f"{self.port} dp{self.dp}"

    @property
    def runs(self) -> bool:
        """Whether it answers requests, as far as its file tells."""
        return self.status in (DECODING, IDLE)


def find_engines(folder: Path, port: int | None = None, now: float | None = None) -> list[Engine]:
    """Every engine with a state file, by port, ended servers included.

    - `folder`: the folder of the state files.
    - `port`: only the server on this port.
    - `now`: seconds since the epoch; default: the clock.
    """
    now = time.time() if now is None else now
    groups: dict[tuple[int, int], list[tuple[tuple[int, int], Path]]] = {}
    for path in folder.glob("*.json"):
        match = _NAME.fullmatch(path.name)
        if match is None or (port is not None and int(match["port"]) != port):
            continue
        key = (int(match["port"]), -1 if match["dp"] is None else int(match["dp"]))
        groups.setdefault(key, []).append(((int(match["pp"] or 0), int(match["tp"])), path))
    engines = []
    for (number, dp), files in sorted(groups.items()):
        paths = [path for _, path in sorted(files)]
        engines.append(_engine(number, None if dp < 0 else dp, paths, now))
    return engines


def _engine(port: int, dp: int | None, paths: list[Path], now: float) -> Engine:
    first = paths[0]
    try:
        reading = read_state(first)
    except StateError as error:
        return Engine(port, dp, first, UNREADABLE, 0.0, None, Counters(), len(paths), str(error))
    counters, processes = reading.counters, 1
    for path in paths[1:]:
        try:
            other = read_state(path)
        except StateError:
            continue
        # An earlier server may have left the file of a rank behind.
        if process_runs(other.pid) != process_runs(reading.pid):
            continue
        processes += 1
        counters = replace(
            counters,
            kv_bytes_read=counters.kv_bytes_read + other.counters.kv_bytes_read,
            kv_bytes_query_guided=counters.kv_bytes_query_guided
            + other.counters.kv_bytes_query_guided,
        )
    since = max(0.0, now - reading.updated)
    return Engine(
        port, dp, first, _status(reading, since, now), since, reading, counters, processes
    )


def _status(reading: StateReading, since: float, now: float) -> str:
    silent = now - reading.sign_of_life
    # A server in a container may have a process id that means nothing here.
    if silent > SILENT_SECONDS:
        return SILENT if process_runs(reading.pid) else ENDED
    if not process_runs(reading.pid) and silent > IDLE_SECONDS:
        return ENDED
    return DECODING if since < IDLE_SECONDS and reading.counters.decode_steps else IDLE
