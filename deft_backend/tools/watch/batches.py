"""The last batch of an engine and its rates, for views that look again and again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from deft_backend.forest import PrefixForest
from deft_backend.telemetry.counters import Counters
from deft_backend.telemetry.state_reader import BatchQuestion, StateError
from deft_backend.tools.watch.engines import Engine

_PATIENCE = 20.0  # seconds after which a question without an answer is asked again


@dataclass(frozen=True)
class ShownBatch:
    """A batch, or why there is none to show."""

    forest: PrefixForest | None = None
    rids: Sequence[str] = ()  # the host's names of its requests, if known
    problem: str = ""


@dataclass(frozen=True)
class SharedPrefix:
    """A node that several requests attend to; `saved` counts the tokens that are not read again."""

    request: int
    start: int
    tokens: int
    readers: int

    @property
    def saved(self) -> int:
        return self.tokens * (self.readers - 1)


def shared_prefixes(forest: PrefixForest) -> list[SharedPrefix]:
    """The nodes with several readers, sorted by what they save, most first."""
    columns = (forest.request, forest.start, forest.length, forest.num_queries)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    prefixes = [SharedPrefix(*row) for row in rows]
    return sorted((p for p in prefixes if p.readers > 1 and p.tokens), key=lambda p: -p.saved)


@dataclass(frozen=True)
class Stretch:
    """The counts of the last `seconds` seconds."""

    counters: Counters
    seconds: float

    @property
    def steps_a_second(self) -> float:
        return self.counters.decode_steps / self.seconds if self.seconds else 0.0


class Rate:
    """Keeps readings of one engine, and subtracts the oldest of the last seconds from the newest.

    Counters that went down belong to another server on the same port, so counting starts again.
    """

    def __init__(self, seconds: float = 5.0) -> None:
        self._seconds = seconds
        self._readings: deque[tuple[float, int, Counters]] = deque()

    def add(self, now: float, pid: int, counters: Counters) -> Stretch | None:
        """The stretch up to this reading; None at the first one."""
        readings = self._readings
        if readings and (
            readings[-1][1] != pid or readings[-1][2].decode_steps > counters.decode_steps
        ):
            readings.clear()
        readings.append((now, pid, counters))
        while len(readings) > 2 and now - readings[1][0] >= self._seconds:
            readings.popleft()
        began, _, before = readings[0]
        return Stretch(counters - before, now - began) if now > began else None


@dataclass(frozen=True)
class Row:
    """One engine at one time."""

    engine: Engine
    batch: ShownBatch
    now: Stretch | None


class Follower:
    """Follows the last batch and the counts of one engine, between two looks.

    With the host planner, the batch is in the state file. With the device planner, the follower
    asks the server, at most every `seconds`, and only after further decode steps.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._rate = Rate()
        self._shown = ShownBatch(problem="no batch has gone through tree attention yet")
        self._question: BatchQuestion | None = None
        self._asked_at = float("-inf")
        self._asked_steps = -1

    def look(self, engine: Engine, wait: float = 0.0) -> Row:
        """The engine now; waits at most `wait` seconds for a server that was just asked."""
        reading = engine.reading
        if reading is None:
            return Row(engine, ShownBatch(problem=engine.problem), None)
        if reading.forest is not None:
            self._shown = ShownBatch(reading.forest, reading.rids)
        elif reading.counters.steps_tree:
            end = time.monotonic() + wait
            self._follow(engine, reading.counters.steps_tree)
            while self._question is not None and time.monotonic() < end:
                time.sleep(0.05)
                self._follow(engine, reading.counters.steps_tree)
        now = self._rate.add(time.monotonic(), reading.pid, engine.counters)
        return Row(engine, self._shown, now)

    def close(self) -> None:
        """Take back a question that is still open."""
        if self._question is not None:
            self._question.withdraw()
            self._question = None

    def _follow(self, engine: Engine, steps: int) -> None:
        now = time.monotonic()
        try:
            forest = None if self._question is None else self._question.answer()
            if forest is not None:
                self._shown, self._question = ShownBatch(forest), None
            pause = self._seconds if self._question is None else _PATIENCE
            if now - self._asked_at >= pause and steps != self._asked_steps and engine.runs:
                self.close()
                self._asked_at, self._asked_steps = now, steps
                self._question = BatchQuestion(engine.path)
                if self._shown.forest is None:
                    self._shown = ShownBatch(problem="the server has not shown its batch yet")
        except StateError as error:
            self._question = None
            self._shown = ShownBatch(problem=str(error).split(": ", 1)[-1])
