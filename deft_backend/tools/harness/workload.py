"""A workload as data: the requests for a server, their order and their times."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate

from deft_backend.tools.traces.recorded_trees import ROOT, ThoughtTree

Prompt = str | tuple[int, ...]  # text, or token ids


class WorkloadError(ValueError):
    """The workload is unknown, or cannot have the given sizes."""


@dataclass(frozen=True)
class Request:
    name: str  # unique in its workload
    # Text, token ids, or a function that makes the text when it is needed. With `after`, the part
    # behind the earlier request's prompt and answer.
    prompt: Prompt | Callable[[], str]
    max_tokens: int  # tokens to decode, exactly (the end-of-sequence token is ignored)
    # Name of the request whose answer this request continues; it starts when that answer ends.
    after: str | None = None
    at: float = 0.0  # seconds from the start until it is sent
    prompt_tokens: int | None = None  # tokens that the prompt should have
    # Names of requests whose answers stand between that answer and the request's own part: what
    # sub-agents found stands before an agent's next turn.
    returned: tuple[str, ...] = ()
    temperature: float = 0.0

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise WorkloadError(
                f"{self.name} asks for {self.max_tokens} tokens; expected 1 or more"
            )

    def own_part(self) -> Prompt:
        return self.prompt if isinstance(self.prompt, str | tuple) else self.prompt()


@dataclass(frozen=True)
class Workload:
    name: str
    description: str  # a description of the requests, in one line
    # Prompts sent one after another before the clock starts, so that the server caches shared
    # prefixes.
    warm: tuple[Prompt, ...]
    requests: tuple[Request, ...]
    arrivals: str = "all at once"  # how requests arrive, for people

    def __post_init__(self) -> None:
        known: set[str] = set()
        for request in self.requests:
            if request.name in known:
                raise WorkloadError(f"two requests are called {request.name!r}")
            for earlier in (request.after, *request.returned):
                if earlier is not None and earlier not in known:
                    raise WorkloadError(f"{request.name!r} comes after unknown {earlier!r}")
            known.add(request.name)

    @property
    def tokens(self) -> int:
        return sum(request.max_tokens for request in self.requests)

    def arriving(self, rate: float | None, seed: int) -> Workload:
        """The same requests at `rate` a second, or all at once; continuations still wait."""
        if rate is None:
            return self
        starts = [request.name for request in self.requests if request.after is None]
        times, arrivals = poisson(len(starts), rate, seed)
        due = dict(zip(starts, times, strict=True))
        requests = tuple(replace(r, at=due.get(r.name, 0.0)) for r in self.requests)
        return replace(self, requests=requests, arrivals=arrivals)


def poisson(count: int, rate: float, seed: int) -> tuple[list[float], str]:
    if not 0 < rate < float("inf"):
        raise WorkloadError(f"the rate is {rate}; expected requests a second, above 0")
    chance = random.Random(f"gaps {seed}")
    gaps = [chance.expovariate(rate) for _ in range(count)]
    return list(accumulate(gaps)), f"Poisson, {rate:g} a second, seed {seed}"


def thought_requests(
    tree: ThoughtTree, prompt: Prompt, mark: Callable[[int], Prompt]
) -> tuple[Request, ...]:
    """The requests that replay a tree: the children of a thought start when it ends. A thought
    without tokens is not sent. `mark` makes a thought differ from its siblings, which greedy
    decoding would answer alike.
    """
    requests: list[Request] = []
    pending = _children(tree, ROOT, None)
    while pending:
        node, after = pending.pop()
        thought = tree.nodes[node]
        name = after
        if thought.tokens:
            name = thought_name(node)
            own = mark(node)
            if after is None:
                own = prompt + own  # type: ignore[operator]
            requests.append(Request(name, own, thought.tokens, after=after))
        pending.extend(_children(tree, node, name))
    return tuple(requests)


def thought_name(node: int) -> str:
    return f"thought {node}"


def _children(tree: ThoughtTree, node: int, name: str | None) -> list[tuple[int, str | None]]:
    return [(child, name) for child in reversed(tree.nodes[node].children)]
