"""Compare the answers of two servers, by token ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

from deft_backend.tools.harness.answers import Answer
from deft_backend.tools.harness.workload import Replayed

CLOSE = 0.15
"""A margin of log-probability below which the rounding of two correct 16-bit kernels can decide."""

MARGINS = 12  # most different answers of a workload for which both servers tell their margins

Told = tuple[str, float | None]  # A token, and the log-probability that its server gave it


@dataclass(frozen=True)
class Difference:
    name: str
    position: int  # tokens before it
    # Log-probability of the likeliest token there, minus that of the next one: the larger margin of
    # both servers. None if no server was asked, or none can tell.
    margin: float | None
    # Each server's token, if the answers carry log-probabilities.
    tokens: tuple[Told, Told] | None = None


@dataclass(frozen=True)
class Agreement:
    # Answers.
    compared: int
    equal: int
    differences: tuple[Difference, ...] = ()
    not_compared: int = 0  # answers whose prompt continues a different answer
    tokens: int = 0  # tokens before the first differences
    # Largest difference of the servers' log-probabilities over those tokens, if known.
    largest_gap: float | None = None
    close: float = CLOSE  # a smaller margin is a near tie

    @property
    def unexplained(self) -> int:
        return sum(d.margin is not None and d.margin >= self.close for d in self.differences)


def agreement(
    first: Replayed, second: Replayed, after: Mapping[str, Sequence[str]] | None = None
) -> Agreement:
    """Compare the answers that both servers gave. Requests that continue (`after`) a different
    answer had different prompts and are left out.
    """
    answers = second.answers
    differences: list[Difference] = []
    differ: set[str] = set()
    equal = not_compared = tokens = 0
    gaps: list[float] = []
    for name, one in first.answers.items():
        if name not in answers:
            continue
        if not differ.isdisjoint((after or {}).get(name, ())):
            differ.add(name)
            not_compared += 1
            continue
        other = answers[name]
        at = _differs(one, other)
        known = len(other.arrivals) if at is None else at
        tokens += known
        pairs = zip(one.logprobs[:known], other.logprobs[:known], strict=False)
        gaps += [abs(a - b) for a, b in pairs]
        if at is None:
            equal += 1
        else:
            differ.add(name)
            differences.append(_difference(name, one, other, at))
    compared, gap = equal + len(differences), max(gaps, default=None)
    return Agreement(compared, equal, tuple(differences), not_compared, tokens, gap)


def _difference(name: str, one: Answer, other: Answer, at: int) -> Difference:
    """A difference, with margin and tokens if the answers carry log-probabilities."""
    if not (one.logprobs and other.logprobs):
        return Difference(name, at, None)
    margins = [a.margin(at) for a in (one, other) if at < len(a.top) and len(a.top[at]) > 1]
    return Difference(name, at, max(margins, default=None), (_told(one, at), _told(other, at)))


def _told(answer: Answer, at: int) -> Told:
    if at >= len(answer.logprobs):
        return "(end)", None
    return answer.tokens[at], answer.logprobs[at]


def _differs(first: Answer, second: Answer) -> int | None:
    """Tokens before the first difference; None if the answers are equal."""
    pairs = enumerate(zip_longest(first.ids, second.ids))
    return next((at for at, (one, other) in pairs if one != other), None)
