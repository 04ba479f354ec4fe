"""Compare the answers of any two servers, by token ids or by text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from deft_backend.tools.harness.answers import Answer, first_difference, nearest
from deft_backend.tools.harness.replay import Replayed

CLOSE = 0.15
"""A margin of log-probability below which the rounding of two correct 16-bit kernels can decide."""


@dataclass(frozen=True)
class Difference:
    """The first difference of two answers.

    Attributes
    ----------
    name : str
    position : int
        Tokens before it.
    margin : float, optional
        Log-probability of the likeliest token there, minus that of the next one: the larger margin
        of the servers that still run. None if no server was asked, or none can tell.
    """

    name: str
    position: int
    margin: float | None


@dataclass(frozen=True)
class LiveAgreement:
    """Tokens of the requests that both servers answered.

    Attributes
    ----------
    compared, equal : int
        Answers.
    differences : tuple of Difference
    close : float
        A smaller margin is a near tie.
    """

    compared: int
    equal: int
    differences: tuple[Difference, ...] = ()
    close: float = CLOSE

    @property
    def unexplained(self) -> int:
        """Answers that differ where a server was sure of its token."""
        return sum(d.margin is not None and d.margin >= self.close for d in self.differences)


def agreement(first: Replayed, second: Replayed) -> LiveAgreement:
    """Compare the answers that both servers gave, by token ids, else by text.

    An answer of a request with several is compared with the nearest of the other server's answers.
    A difference has the name of the second server's answer.
    """
    given = [_by_request(run) for run in (first, second)]
    equal = 0
    found = []
    for name in given[0]:
        if name not in given[1]:
            continue
        for ours, theirs in _pairs(given[0][name], given[1][name]):
            at = _differs(ours, theirs)
            if at is None:
                equal += 1
            else:
                named = f"{name} #{theirs.index}" if theirs.index else name
                found.append(Difference(named, at, None))
    return LiveAgreement(equal + len(found), equal, tuple(found))


def _by_request(run: Replayed) -> dict[str, list[Answer]]:
    given: dict[str, list[Answer]] = {}
    for outcome in run.outcomes:
        if outcome.answer is not None:
            given.setdefault(outcome.name, []).append(outcome.answer)
    return given


def _pairs(first: Sequence[Answer], second: Sequence[Answer]) -> list[tuple[Answer, Answer]]:
    """Each answer of the second server, and each of the first that the second never gave."""
    pairs = [(nearest(answer, first, _agreed), answer) for answer in second]
    if len(first) == 1:
        return pairs
    for answer in first:
        other = nearest(answer, second, _agreed)
        known = any(a is answer and b is other for a, b in pairs)
        if not known and _differs(answer, other) is not None:
            pairs.append((answer, other))
    return pairs


def _agreed(one: Answer, other: Answer) -> float:
    at = _differs(one, other)
    return math.inf if at is None else at


def _differs(first: Answer, second: Answer) -> int | None:
    """Tokens of the second before the first difference; None if the answers are equal."""
    counts = len(first.arrivals), len(second.arrivals)
    if (len(first.ids), len(second.ids)) == counts:
        if first.ids == second.ids:
            return None
        at = first_difference(first.ids, second.ids)
        return min(counts) if at is None else at
    if first.text == second.text:
        return None
    characters = first_difference(first.text, second.text)
    if characters is None:
        characters = min(len(first.text), len(second.text))
    ends = accumulate(len(text) for text in second.tokens)
    return next((at for at, end in enumerate(ends) if end > characters), len(second.tokens))
