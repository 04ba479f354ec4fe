"""A workload as data, and its replay: requests to a server, in their order and at their times."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from deft_backend.tools.harness.answers import (
    ANSWERED,
    CUT,
    FAILED,
    LOST,
    SKIPPED,
    TOO_LONG,
    Answer,
    NotAnswered,
    Prompt,
)
from deft_backend.tools.harness.client import ServerClient
from deft_backend.tools.traces.thought_trees import ROOT, ThoughtTree


class WorkloadError(ValueError):
    """The workload is unknown, or cannot have the given sizes."""


@dataclass(frozen=True)
class Request:
    name: str  # unique in its workload
    # Text, token ids, or a function that makes either when it is needed. With `after`, the part
    # behind the earlier request's prompt and answer.
    prompt: Prompt | Callable[[], Prompt]
    max_tokens: int  # tokens to decode, exactly, 1 or more (the end-of-sequence token is ignored)
    # Name of the request whose answer this request continues; it starts when that answer ends.
    after: str | None = None
    at: float = 0.0  # seconds from the start until it is sent
    prompt_tokens: int | None = None  # tokens that the prompt should have
    # Names of requests whose answers stand between that answer and the request's own part: what
    # sub-agents found stands before an agent's next turn.
    returned: tuple[str, ...] = ()
    temperature: float = 0.0

    @property
    def continues(self) -> tuple[str, ...]:
        """Names of the requests whose answers its prompt holds."""
        return self.returned if self.after is None else (self.after, *self.returned)

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
            for earlier in request.continues:
                if earlier not in known:
                    raise WorkloadError(f"{request.name!r} comes after unknown {earlier!r}")
            known.add(request.name)

    @property
    def tokens(self) -> int:
        return sum(request.max_tokens for request in self.requests)

    def arriving(self, rate: float | None) -> Workload:
        """The same requests at `rate` a second, or all at once; continuations still wait."""
        if rate is None:
            return self
        starts = [request.name for request in self.requests if request.after is None]
        times, arrivals = poisson(len(starts), rate)
        due = dict(zip(starts, times, strict=True))
        requests = tuple(replace(r, at=due.get(r.name, 0.0)) for r in self.requests)
        return replace(self, requests=requests, arrivals=arrivals)

    def renewed(self, turn: int) -> Workload:
        """The same requests with another text at their start, so that no server has cached it."""

        def headed(request: Request) -> Request:
            if request.after is not None:
                return request
            return replace(request, prompt=lambda: f"{turn}. {request.own_part()}")

        warm = tuple(f"{turn}. {prompt}" for prompt in self.warm)
        return replace(self, warm=warm, requests=tuple(map(headed, self.requests)))


def poisson(count: int, rate: float) -> tuple[list[float], str]:
    if not 0 < rate < float("inf"):
        raise WorkloadError(f"the rate is {rate}; expected requests a second, above 0")
    chance = random.Random("gaps 0")
    gaps = [chance.expovariate(rate) for _ in range(count)]
    return list(accumulate(gaps)), f"Poisson, {rate:g} a second"


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
            name = f"thought {node}"
            own = mark(node)
            if after is None:
                own = prompt + own  # type: ignore[operator]
            requests.append(Request(name, own, thought.tokens, after=after))
        pending.extend(_children(tree, node, name))
    return tuple(requests)


def _children(tree: ThoughtTree, node: int, name: str | None) -> list[tuple[int, str | None]]:
    return [(child, name) for child in reversed(tree.nodes[node].children)]


_PAUSES = (0.0, 1.0, 1.0)
"""Seconds before each question to a server that lost a request; then the run takes it for dead."""


@dataclass(frozen=True)
class Outcome:
    name: str  # the request's
    # Seconds from the start: when it was due, and when it was sent.
    at: float
    sent: float
    status: str
    detail: str
    max_tokens: int
    answer: Answer | None = None
    prompt_tokens: int | None = None  # by the server's count


@dataclass(frozen=True)
class Replayed:
    outcomes: tuple[Outcome, ...]  # in the workload's order
    seconds: float  # until the last answer
    died: str = ""  # why the run believes that the server died; empty if it did not
    interrupted: bool = False

    @property
    def answers(self) -> dict[str, Answer]:
        """Answers by the names of their requests."""
        return {o.name: o.answer for o in self.outcomes if o.answer is not None}


async def replay(
    workload: Workload,
    client: ServerClient,
    context: int | None = None,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> Replayed:
    """Warm the shared prompts, then send every request when it is due, unless it exceeds `context`.
    No failure ends the run, except the server's death. A cancelled run returns what it has.
    """
    return await _Run(workload, client, context, on_tokens).all()


@dataclass
class _Run:
    workload: Workload
    client: ServerClient
    context: int | None
    on_tokens: Callable[[int], None]
    began: float = 0.0
    died: str = ""
    stopped: bool = False
    checking: asyncio.Task[None] | None = None
    ended: dict[str, asyncio.Future[tuple[Prompt, Answer] | None]] = field(default_factory=dict)

    async def all(self) -> Replayed:
        requests = self.workload.requests
        tasks: list[asyncio.Task[Outcome]] = []
        try:
            for prompt in self.workload.warm:
                try:
                    await self.client.ask(prompt, 1)
                except NotAnswered as error:
                    await self._check(error)
            self.began = time.perf_counter()
            loop = asyncio.get_running_loop()
            parents = {name for request in requests for name in request.continues}
            self.ended = {name: loop.create_future() for name in parents}
            tasks = [asyncio.create_task(self._one(request)) for request in requests]
            await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            self.stopped = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        return self._replayed(requests, tasks)

    def _replayed(
        self, requests: Sequence[Request], tasks: Sequence[asyncio.Task[Outcome]]
    ) -> Replayed:
        outcomes: list[Outcome] = []
        for at, request in enumerate(requests):
            task = tasks[at] if at < len(tasks) else None
            if task is not None and task.done() and not task.cancelled():
                outcomes.append(task.result())
            else:  # cancelled before its first step
                outcomes.append(self._lost(request, SKIPPED, "the run was interrupted"))
        ends = [o.sent + o.answer.arrivals[-1] for o in outcomes if o.answer is not None]
        return Replayed(tuple(outcomes), max(ends, default=0.0), self.died, self.stopped)

    async def _one(self, request: Request) -> Outcome:
        sent: float | None = None
        ended: tuple[Prompt, Answer] | None = None
        try:
            if request.after is None:
                await asyncio.sleep(request.at - (time.perf_counter() - self.began))
                prompt: Prompt | None = request.own_part()
            else:
                prompt = await self._continued(request)
            if prompt is None:
                why = f"it continues {request.after}, which has no answer"
                return self._lost(request, SKIPPED, why)
            if self.died:
                return self._lost(request, SKIPPED, "the server had died")
            tokens = (request.prompt_tokens or 0) + request.max_tokens
            if self.context is not None and tokens > self.context:
                why = f"{tokens:,} tokens, and the context holds {self.context:,}"
                return self._lost(request, TOO_LONG, why)
            sent = time.perf_counter() - self.began
            answer, counted = await self.client.ask(
                prompt, request.max_tokens, self.on_tokens, temperature=request.temperature
            )
            answer.request = request.name
            ended = prompt, answer
        except NotAnswered as error:
            if error.status in (LOST, FAILED):
                await self._check(error)
            return self._lost(request, error.status, str(error), sent)
        except asyncio.CancelledError:
            self.stopped = True
            status = SKIPPED if sent is None else CUT
            return self._lost(request, status, "the run was interrupted", sent)
        finally:
            future = self.ended.get(request.name)
            if future is not None and not future.done():
                future.set_result(ended)
        return Outcome(
            request.name, request.at, sent, ANSWERED, "", request.max_tokens, answer, counted
        )

    async def _continued(self, request: Request) -> Prompt | None:
        found = [await asyncio.shield(self.ended[name]) for name in request.continues]
        earlier = [pair for pair in found if pair is not None]
        if len(earlier) < len(found):
            return None
        before, own = earlier[0][0], request.own_part()
        if isinstance(before, str):
            assert isinstance(own, str)
            return before + "".join(answer.text for _, answer in earlier) + own
        assert isinstance(own, tuple)
        return (*before, *(id for _, answer in earlier for id in answer.ids), *own)

    def _lost(
        self, request: Request, status: str, detail: str, sent: float | None = None
    ) -> Outcome:
        sent = request.at if sent is None else sent
        return Outcome(request.name, request.at, sent, status, detail, request.max_tokens)

    async def _check(self, error: NotAnswered) -> None:
        """Whether the server has died; requests that ask at the same time share one question."""
        if self.died:
            return
        if self.checking is None or self.checking.done():
            self.checking = asyncio.create_task(self._still_there(error))
        await asyncio.shield(self.checking)

    async def _still_there(self, error: NotAnswered) -> None:
        for pause in _PAUSES:
            await asyncio.sleep(pause)
            if await self.client.lives():
                return
        self.died = f"{self.client.url} no longer answers; the first lost request: {error}"
