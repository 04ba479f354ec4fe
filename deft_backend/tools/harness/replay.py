"""Sends a workload to a server at its own times, and records what became of every request."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from deft_backend.tools.harness.answers import (
    ANSWERED,
    CUT,
    FAILED,
    LOST,
    SKIPPED,
    TOO_LONG,
    Answer,
    NotAnswered,
)
from deft_backend.tools.harness.client import ServerClient
from deft_backend.tools.harness.workload import Prompt, Request, Workload

_CHECKS = 3
"""How often the run asks a server that lost a request, before it takes the server for dead."""

_CHECK_SECONDS = 1.0


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
            parents = {
                name for r in requests for name in (r.after, *r.returned) if name is not None
            }
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
                prompt = await self._continued(request, request.after)
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

    async def _continued(self, request: Request, after: str) -> Prompt | None:
        found = [await asyncio.shield(self.ended[name]) for name in (after, *request.returned)]
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
        for attempt in range(_CHECKS):
            if await self.client.lives():
                return
            if attempt < _CHECKS - 1:
                await asyncio.sleep(_CHECK_SECONDS)
        self.died = f"{self.client.url} no longer answers; the first lost request: {error}"
