"""A workload as data: the requests for a server, and their order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

Prompt = str | tuple[int, ...]
"""Text, or token ids."""


class WorkloadError(ValueError):
    """The workload is unknown, or cannot have the given sizes."""


@dataclass(frozen=True)
class Request:
    """One completion request.

    Attributes
    ----------
    name : str
        Unique in its plan.
    prompt : str or tuple of int
        Text or token ids. With `after`, the part behind the earlier request's prompt and answer.
    max_tokens : int
        Tokens to decode, exactly (the end-of-sequence token is ignored).
    n : int
        Answers to the prompt.
    after : str, optional
        Name of the request whose answer this request continues; it starts when that answer ends.
    """

    name: str
    prompt: Prompt
    max_tokens: int
    n: int = 1
    after: str | None = None

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise WorkloadError(
                f"{self.name} asks for {self.max_tokens} tokens; expected 1 or more"
            )


@dataclass(frozen=True)
class RequestPlan:
    """Requests to be sent together.

    Attributes
    ----------
    workload : str
        Name of the workload.
    description : str
        A description of the requests, in one line.
    warm : tuple of prompts
        Prompts sent one after another before the clock starts, so that shared prefixes are cached.
    requests : tuple of Request
        Requests without `after` are sent at the same time.
    """

    workload: str
    description: str
    warm: tuple[Prompt, ...]
    requests: tuple[Request, ...]

    def __post_init__(self) -> None:
        known: set[str] = set()
        for request in self.requests:
            if request.name in known:
                raise WorkloadError(f"two requests are called {request.name!r}")
            if request.after is not None and request.after not in known:
                raise WorkloadError(f"{request.name!r} comes after unknown {request.after!r}")
            known.add(request.name)

    @property
    def tokens(self) -> int:
        """Tokens to decode, over all requests."""
        return sum(request.max_tokens * request.n for request in self.requests)


class Workload(Protocol):
    """A description of traffic that gives the same plan on every machine."""

    def plan(self) -> RequestPlan:
        """The requests."""
        ...


def at_least_one(**sizes: int) -> None:
    """Refuse sizes below 1, by name."""
    for name, size in sizes.items():
        if size < 1:
            raise WorkloadError(f"{name} is {size}; expected at least 1")
