"""The last batch of an engine and its rates, for views that look again and again."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
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
    seen: float = 0.0  # when this process received it, on :func:`time.monotonic`'s clock
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


class BatchView:
    """Follows the last batch of one engine.

    With the host planner, the batch is in the state file. With the device planner, the view asks
    the server, at most every `seconds`, and only after further decode steps.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._shown = ShownBatch(problem="no batch has gone through tree attention yet")
        self._question: BatchQuestion | None = None
        self._asked_at = float("-inf")
        self._asked_steps = -1

    def look(self, engine: Engine) -> ShownBatch:
        """The newest batch known; never waits."""
        reading = engine.reading
        if reading is None:
            return ShownBatch(problem=engine.problem)
        if reading.forest is not None:
            return ShownBatch(reading.forest, reading.rids, self._clock())
        if reading.counters.steps_tree:
            self._follow(engine, reading.counters.steps_tree)
        return self._shown

    def wait(self, engine: Engine, seconds: float) -> ShownBatch:
        """The newest batch; waits for a server that was just asked, at most `seconds`."""
        end = self._clock() + seconds
        shown = self.look(engine)
        while self._question is not None and self._clock() < end:
            time.sleep(0.05)
            shown = self.look(engine)
        return shown

    def close(self) -> None:
        """Take back a question that is still open."""
        if self._question is not None:
            self._question.withdraw()
            self._question = None

    def _follow(self, engine: Engine, steps: int) -> None:
        now = self._clock()
        try:
            if self._question is not None:
                forest = self._question.answer()
                if forest is not None:
                    self._shown = ShownBatch(forest, (), now)
                    self._question = None
                elif now - self._asked_at > _PATIENCE:
                    self.close()
            due = now - self._asked_at >= self._seconds and steps != self._asked_steps
            if self._question is None and due and engine.runs:
                self._asked_at, self._asked_steps = now, steps
                self._question = BatchQuestion(engine.path)
                if self._shown.forest is None:
                    self._shown = ShownBatch(problem="the server has not shown its batch yet")
        except StateError as error:
            self._question = None
            self._shown = ShownBatch(problem=str(error).split(": ", 1)[-1])


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
    """What a view remembers of one engine between two looks.

    - `seconds`: between two questions for the batch of a server with the device planner.
    """

    def __init__(self, seconds: float) -> None:
        self._batches = BatchView(seconds)
        self._rate = Rate()

    def look(self, engine: Engine, wait: float = 0.0) -> Row:
        """The engine now; waits at most `wait` seconds for a server that was just asked."""
        batch, now = self._batches.wait(engine, wait), None
        if engine.reading is not None:
            now = self._rate.add(time.monotonic(), engine.reading.pid, engine.counters)
        return Row(engine, batch, now)

    def close(self) -> None:
        """Take back a question that is still open."""
        self._batches.close()
