"""Traffic: requests with the time at which each is sent, all at once or spread over time."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from deft_backend.tools.harness.request_plan import RequestPlan, WorkloadError


@dataclass(frozen=True)
class TimedRequest:
    """One request.

    Attributes
    ----------
    name : str
        Unique in its traffic.
    at : float
        Seconds from the start until it is sent.
    prompt : callable
        Makes the text, when it is needed; of a request with `after`, the part behind the answer.
    max_tokens, n : int
        Tokens of an answer, and the number of answers.
    after : str, optional
        Name of the request whose answer this one continues; it is sent when that answer ends.
    prompt_tokens : int, optional
        Tokens that the prompt should have.
    """

    name: str
    at: float
    prompt: Callable[[], str]
    max_tokens: int
    n: int = 1
    after: str | None = None
    prompt_tokens: int | None = None


@dataclass(frozen=True)
class Traffic:
    """The requests of one workload, by time.

    Attributes
    ----------
    workload, description : str
    arrivals : str
        How requests arrive, for people.
    warm : tuple of str
        Prompts that are sent before the clock starts.
    requests : tuple of TimedRequest
    """

    workload: str
    description: str
    arrivals: str
    warm: tuple[str, ...]
    requests: tuple[TimedRequest, ...]

    @property
    def tokens(self) -> int:
        return sum(request.max_tokens * request.n for request in self.requests)


def timed(plan: RequestPlan, rate: float | None, seed: int) -> Traffic:
    """A plan of text prompts as traffic.

    Parameters
    ----------
    plan : RequestPlan
    rate : float, optional
        Requests a second, with exponential gaps (Poisson arrivals). Without a rate, all are sent
        at once (closed loop). A request that continues another is sent when that one ends.
    seed : int
        Of the gaps.
    """
    starts = [request for request in plan.requests if request.after is None]
    times, arrivals = [0.0] * len(starts), "all at once"
    if rate is not None:
        times, arrivals = poisson(len(starts), rate, seed)
    due = dict(zip((request.name for request in starts), times, strict=True))
    found = []
    for request in plan.requests:
        if not isinstance(request.prompt, str):
            raise TypeError(f"{request.name} has token ids; expected text")
        found.append(
            TimedRequest(
                request.name, due.get(request.name, 0.0), _text(request.prompt),
                request.max_tokens, request.n, request.after,
            )
        )  # fmt: skip
    warm = tuple(prompt for prompt in plan.warm if isinstance(prompt, str))
    return Traffic(plan.workload, plan.description, arrivals, warm, tuple(found))


def poisson(count: int, rate: float, seed: int) -> tuple[list[float], str]:
    """Times of Poisson arrivals in seconds, and how people call them.

    Raises
    ------
    WorkloadError
        If the rate is impossible.
    """
    if not 0 < rate < float("inf"):
        raise WorkloadError(f"the rate is {rate}; expected requests a second, above 0")
    chance = random.Random(f"gaps {seed}")
    gaps = [chance.expovariate(rate) for _ in range(count)]
    return list(accumulate(gaps)), f"Poisson, {rate:g} a second, seed {seed}"


def _text(prompt: str) -> Callable[[], str]:
    return lambda: prompt
