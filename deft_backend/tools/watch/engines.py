"""The engines that decode on this machine, and what each of them is doing."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from deft_backend.forest import PrefixForest
from deft_backend.telemetry.counters import Counters, Place
from deft_backend.telemetry.state_reader import (
    SILENT_SECONDS,
    BatchQuestion,
    StateError,
    StateFile,
    StateReading,
    read_state,
    state_files,
)

DECODING, IDLE, SILENT, ENDED, UNREADABLE = "decoding", "idle", "silent", "ended", "unreadable"

IDLE_SECONDS = 5.0
"""An engine without a decode step for this long is idle. Its writer looks four times a second."""


@dataclass(frozen=True)
class Engine:
    """The processes of a server that decode one batch together."""

    port: int
    place: Place
    dp: int | None  # its data-parallel rank; None if the server has one engine
    path: Path  # the state file of its first process
    status: str  # one of the names above
    # Seconds since its last decode step, or since the first reading of a server that did none. Of a
    # server that is silent or has ended: seconds since its writer's last sign of life.
    since: float
    reading: StateReading | None  # of its first process; None if it is unreadable
    counters: Counters  # steps of the first process; bytes of all its processes
    processes: int
    problem: str = ""  # why it is unreadable

    @property
    def name(self) -> str:
        """The port, with the data-parallel rank if there are several, and where it is elsewhere."""
        where = "" if self.place == Place.here() else f" on {self.place.machine}"
        return f"{self.port}" + ("" if self.dp is None else f" dp{self.dp}") + where

    @property
    def runs(self) -> bool:
        return self.status in (DECODING, IDLE)


def find_engines(folder: Path, port: int | None = None, now: float | None = None) -> list[Engine]:
    now = time.time() if now is None else now
    groups: dict[tuple[int, int | None, Place], dict[tuple[int | None, int], StateFile]] = {}
    for file in state_files(folder, port):  # the newest file of each rank comes first
        ranks = groups.setdefault((file.name.port, file.name.dp, file.name.place), {})
        ranks.setdefault((file.name.pp, file.name.tp), file)
    return [_engine(*key, list(ranks.values()), now) for key, ranks in groups.items()]


def _engine(
    port: int, dp: int | None, place: Place, files: Sequence[StateFile], now: float
) -> Engine:
    first, *others = files
    known = port, place, dp, first.path
    try:
        reading = read_state(first.path)
    except StateError as error:
        return Engine(*known, UNREADABLE, 0.0, None, Counters(), len(files), str(error))
    counters, processes = reading.counters, 1
    for file in others:
        if file.lives != first.lives:  # an earlier server may have left the file of a rank behind
            continue
        try:
            other = read_state(file.path).counters
        except StateError:
            continue
        processes += 1
        guided = counters.kv_bytes_query_guided + other.kv_bytes_query_guided
        read = counters.kv_bytes_read + other.kv_bytes_read
        counters = replace(counters, kv_bytes_read=read, kv_bytes_query_guided=guided)
    status, since = _status(reading, first.lives, now)
    return Engine(*known, status, since, reading, counters, processes)


def _status(reading: StateReading, lives: bool, now: float) -> tuple[str, float]:
    silent, resting = (max(0.0, now - at) for at in (reading.sign_of_life, reading.updated))
    if not lives:
        return ENDED, silent
    if silent > SILENT_SECONDS:
        return SILENT, silent
    decodes = resting < IDLE_SECONDS and reading.counters.decode_steps
    return DECODING if decodes else IDLE, resting


RECENT_SECONDS = 5.0  # over which a rate is taken

_PATIENCE = 20.0  # seconds after which a question without an answer is asked again


@dataclass(frozen=True)
class Stretch:
    counters: Counters
    seconds: float

    @property
    def steps_a_second(self) -> float:
        return self.counters.decode_steps / self.seconds if self.seconds else 0.0


class Rate:
    """Subtracts the oldest reading of the last seconds from the newest. After counters went down
    (another server on the port) or a pause, counting starts again.
    """

    def __init__(self) -> None:
        self._readings: deque[tuple[float, int, Counters]] = deque()

    def add(self, now: float, pid: int, counters: Counters) -> Stretch | None:
        readings = self._readings
        if readings:
            at, writer, last = readings[-1]
            another = writer != pid or last.decode_steps > counters.decode_steps
            if another or now - at > 2 * RECENT_SECONDS:
                readings.clear()
        readings.append((now, pid, counters))
        while len(readings) > 2 and now - readings[1][0] >= RECENT_SECONDS:
            readings.popleft()
        began, _, before = readings[0]
        return Stretch(counters - before, now - began) if now > began else None


@dataclass(frozen=True)
class Row:
    engine: Engine
    batch: PrefixForest | str  # its last one, or why it is not known
    now: Stretch | None


class Follower:
    """Follows the last batch and the counts of one engine, between two looks. It asks the server at
    most every `seconds`, and only after further decode steps.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._rate = Rate()
        self._shown: PrefixForest | str = "no batch has gone through tree attention yet"
        self._question: BatchQuestion | None = None
        self._asked_at = float("-inf")
        self._asked_steps = -1

    def look(self, engine: Engine, wait: float = 0.0) -> Row:
        reading = engine.reading
        if reading is None:
            return Row(engine, engine.problem, None)
        if reading.counters.steps_tree:
            end = time.monotonic() + wait
            self._follow(engine, reading.counters.steps_tree)
            while self._question is not None and time.monotonic() < end:
                time.sleep(0.05)
                self._follow(engine, reading.counters.steps_tree)
        now = self._rate.add(time.monotonic(), reading.pid, engine.counters)
        return Row(engine, self._shown, now if engine.runs else None)

    def close(self) -> None:
        if self._question is not None:
            self._question.withdraw()
            self._question = None

    def _follow(self, engine: Engine, steps: int) -> None:
        now = time.monotonic()
        try:
            forest = None if self._question is None else self._question.answer()
            if forest is not None:
                self._shown, self._question = forest, None
            pause = self._seconds if self._question is None else _PATIENCE
            if now - self._asked_at >= pause and steps != self._asked_steps and engine.runs:
                self.close()
                self._asked_at, self._asked_steps = now, steps
                self._question = BatchQuestion(engine.path)
                if isinstance(self._shown, str):
                    self._shown = "the server has not shown its batch yet"
        except StateError as error:
            self._question = None
            self._shown = str(error).split(": ", 1)[-1]
