"""What a server does now: the counters of the last seconds."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from deft_backend.telemetry.counters import Counters


@dataclass(frozen=True)
class Stretch:
    """The counts of the last `seconds` seconds."""

    counters: Counters
    seconds: float

    @property
    def steps_a_second(self) -> float:
        return self.counters.decode_steps / self.seconds if self.seconds else 0.0

    @property
    def saved(self) -> float | None:
        return saved(self.counters)


def saved(counters: Counters) -> float | None:
    """Share of KV reads that these steps saved, 0 to 1; None without a read."""
    guided = counters.kv_bytes_query_guided
    return 1.0 - counters.kv_bytes_read / guided if guided else None


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
