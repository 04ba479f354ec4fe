"""Servers under an open loop of requests: times of their tokens, and goodput.

Requests arrive at a rate, whether or not earlier ones have ended. A gap is the time between two
pieces of a stream: tokens that arrive in one piece have one arrival, as in the hosts' own clients.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter as Tally
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from deft_backend.tools.harness.answers import ANSWERED
from deft_backend.tools.harness.workload import Replayed

BOUND_MS = 50.0
"""Goodput is the highest rate at which the 99th percentile of the gaps stays below this."""

_RANGE = 256.0  # how many times the first rate, at most, and 1 / this, at least
_PRECISION = 1.1  # two rates this close end the search


class Spread(NamedTuple):
    """Mean and nearest-rank percentiles of times, in milliseconds."""

    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Spread | None:
        """None without a time.

        >>> Spread.of([0.001 * at for at in range(1, 101)])
        Spread(mean=50.5, p50=50.0, p95=95.0, p99=99.0)
        """
        if not seconds:
            return None
        ordered = sorted(seconds)
        ranks = (math.ceil(share * len(ordered) / 100) - 1 for share in (50, 95, 99))
        found = (statistics.fmean(ordered), *(ordered[rank] for rank in ranks))
        return cls(*(round(1e3 * time, 3) for time in found))


@dataclass(frozen=True)
class Figures:
    """What a client saw of its requests; times are None without an answer."""

    answered: int
    lost: Mapping[str, int]  # other requests, by what became of them
    ttft_ms: Spread | None  # time to the first token
    tpot_ms: Spread | None  # time per later token, of each answer
    gap_ms: Spread | None  # time between two pieces of a stream
    tokens_a_second: float | None
    late_p95: float | None  # seconds by which the client sent requests late

    @classmethod
    def of(cls, run: Replayed) -> Figures:
        answers = run.answers.values()
        pieces = [sorted(set(answer.arrivals)) for answer in answers]
        late = sorted(o.sent - o.at for o in run.outcomes if o.answer is not None and o.at)
        tokens = sum(len(answer.arrivals) for answer in answers)
        return cls(
            len(answers),
            dict(Tally(o.status for o in run.outcomes if o.status != ANSWERED)),
            Spread.of([answer.ttft for answer in answers]),
            Spread.of([tpot for answer in answers if (tpot := answer.tpot) is not None]),
            Spread.of([end - begin for times in pieces for begin, end in pairwise(times)]),
            tokens_a_second=tokens / run.seconds if run.seconds else None,
            late_p95=late[round(0.95 * (len(late) - 1))] if late else None,
        )

    @property
    def requests(self) -> int:
        return self.answered + sum(self.lost.values())

    @property
    def p99_ms(self) -> float | None:
        """99th percentile of the gaps; None if a request failed, or without a gap."""
        return None if self.gap_ms is None or self.lost else self.gap_ms.p99


@dataclass(frozen=True)
class Goodput:
    rate: float  # requests a second; 0 if no rate that was tried held the bound
    reached: bool  # whether a higher rate broke the bound; if not, goodput may be higher
    bound_ms: float
    trials: tuple[tuple[float, float | None], ...]  # rates, each with its p99 in milliseconds

    def __str__(self) -> str:
        """
        >>> str(Goodput(12.34, True, 50.0, ())), str(Goodput(64.0, False, 50.0, ()))
        ('12.3/s', 'at least 64/s')
        """
        return f"{'' if self.reached else 'at least '}{self.rate:.3g}/s"


class GoodputSearch:
    """Rates to try, one after the other: doubled or halved until the bound is crossed, then between
    the highest that held it and the lowest that broke it.
    """

    def __init__(self, start: float, bound_ms: float) -> None:
        self._start, self._bound_ms = start, bound_ms
        self._held, self._broke = 0.0, math.inf
        self._trials: list[tuple[float, float | None]] = []

    def next_rate(self) -> float | None:
        """The rate to try next; None ends the search."""
        if not self._trials:
            return self._start
        if math.isinf(self._broke):
            rate = 2 * self._held
        elif not self._held:
            rate = self._broke / 2
        elif self._broke <= _PRECISION * self._held:
            return None
        else:
            return math.sqrt(self._held * self._broke)
        return rate if self._start / _RANGE <= rate <= self._start * _RANGE else None

    def tell(self, rate: float, p99_ms: float | None) -> None:
        """The 99th percentile at a rate; None if requests failed, which breaks the bound."""
        self._trials.append((rate, p99_ms))
        if p99_ms is not None and p99_ms < self._bound_ms:
            self._held = max(self._held, rate)
        else:
            self._broke = min(self._broke, rate)

    def found(self) -> Goodput:
        reached = math.isfinite(self._broke)
        return Goodput(self._held, reached, self._bound_ms, tuple(self._trials))
