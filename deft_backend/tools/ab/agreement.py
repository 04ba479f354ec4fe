"""Compare the tokens of two servers: the first difference of each answer, and its margin."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from deft_backend.tools.harness.answers import Answer, compare_answers, nearest
from deft_backend.tools.harness.send_plan import Answered


@dataclass(frozen=True)
class Divergence:
    """The first token in which an answer differs.

    Attributes
    ----------
    answer : str
        Request, and the answer's number within it.
    position : int
        Number of tokens before it, which agree.
    host_token, deft_token : str
        Texts of the two tokens.
    host_logprob, deft_logprob : float
        Each server's log-probability of its own token.
    margin : float
        The host's log-probability of its token, minus that of its second choice. Near 0 it is
        nearly a tie.
    """

    answer: str
    position: int
    host_token: str
    deft_token: str
    host_logprob: float
    deft_logprob: float
    margin: float

    @property
    def gap(self) -> float:
        """Difference of the two log-probabilities."""
        return abs(self.host_logprob - self.deft_logprob)


@dataclass(frozen=True)
class Agreement:
    """Comparison of one workload's answers.

    Attributes
    ----------
    answers, equal : int
        All answers, and those that agree in every token.
    not_compared : int
        Answers whose prompt continues a different answer, so they cannot be compared.
    divergences : tuple
        One for each different answer, in the plan's order.
    tokens : int
        Compared tokens that agree.
    largest_gap : float
        Largest difference of log-probability over those tokens.
    """

    answers: int
    equal: int
    not_compared: int
    divergences: tuple[Divergence, ...]
    tokens: int
    largest_gap: float

    @property
    def same(self) -> bool:
        return self.equal == self.answers


def compare(host: Answered, deft: Answered) -> Agreement:
    """Compare the answers to the same plan.

    An answer of a request with several is compared with the nearest of the host's answers to it.

    Raises
    ------
    ValueError
        If the two do not answer the same plan.
    """
    if host.plan != deft.plan:
        raise ValueError(f"{host.plan.workload} and {deft.plan.workload} are different plans")
    after = {request.name: request.after for request in host.plan.requests}
    differ: set[str] = (
        set()
    )  # requests with a different answer, or whose prompt continues such an answer
    divergences: list[Divergence] = []
    equal = not_compared = tokens = 0
    largest = 0.0
    answers_of: dict[str, list[Answer]] = defaultdict(list)
    for theirs in host.answers:
        answers_of[theirs.request].append(theirs)
    for ours in deft.answers:
        if after[ours.request] in differ:
            differ.add(ours.request)
            not_compared += 1
            continue
        theirs = nearest(ours, answers_of[ours.request], _agreed)
        found = compare_answers(theirs, ours)
        largest = max([largest, *found.differences])
        tokens += found.agreed
        if found.same:
            equal += 1
        else:
            differ.add(ours.request)
            divergences.append(_divergence(theirs, ours, found.agreed))
    return Agreement(len(host.answers), equal, not_compared, tuple(divergences), tokens, largest)


def _agreed(host: Answer, deft: Answer) -> float:
    found = compare_answers(host, deft)
    return math.inf if found.same else found.agreed


def _divergence(host: Answer, deft: Answer, at: int) -> Divergence:
    def pick(answer: Answer) -> tuple[str, float]:
        if at < len(answer.tokens):
            return answer.tokens[at], answer.logprobs[at]
        return "(end)", 0.0

    host_token, host_logprob = pick(host)
    deft_token, deft_logprob = pick(deft)
    name = f"{deft.request} #{deft.index}" if deft.index else deft.request
    return Divergence(name, at, host_token, deft_token, host_logprob, deft_logprob, host.margin(at))
