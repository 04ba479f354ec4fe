"""Compare the answers of any two servers, by token ids or by text."""

from __future__ import annotations

from dataclasses import dataclass

from deft_backend.harness.answers import Answer, first_difference
from deft_backend.harness.replay import Replayed

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
    """Tokens of the requests that both servers answered."""

    compared: int
    equal: int
    differences: tuple[Difference, ...] = ()

    @property
    def unexplained(self) -> int:
        """Answers that differ where a server was sure of its token."""
        return sum(d.margin is not None and d.margin >= CLOSE for d in self.differences)


def agreement(first: Replayed, second: Replayed) -> LiveAgreement:
    """Compare the answers that both servers gave, by token ids, else by text."""
    theirs = {(o.name, o.index): o.answer for o in second.outcomes if o.answer is not None}
    compared = equal = 0
    found = []
    for outcome in first.outcomes:
        other = theirs.get((outcome.name, outcome.index))
        if outcome.answer is None or other is None:
            continue
        compared += 1
        at = _differs(outcome.answer, other)
        if at is None:
            equal += 1
        else:
            name = f"{outcome.name} #{outcome.index}" if outcome.index else outcome.name
            found.append(Difference(name, at, None))
    return LiveAgreement(compared, equal, tuple(found))


def _differs(first: Answer, second: Answer) -> int | None:
    """Tokens before the first difference; None if the answers are equal."""
    counts = len(first.arrivals), len(second.arrivals)
    if (len(first.ids), len(second.ids)) == counts:
        if first.ids == second.ids:
            return None
        at = first_difference(first.ids, second.ids)
        return min(counts) if at is None else at
    if first.text == second.text:
        return None
    characters = first_difference(first.text, second.text)
    shorter = min(len(first.text), len(second.text))
    at = shorter if characters is None else characters
    return round(at * counts[0] / max(1, len(first.text)))
