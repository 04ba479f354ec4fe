"""Sends a plan of requests to a server and collects the answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from deft_backend.tools.harness.answers import Answer
from deft_backend.tools.harness.client import TEXT, Client
from deft_backend.tools.harness.dialects import ClientError
from deft_backend.tools.harness.request_plan import Prompt, Request, RequestPlan

REQUEST_SECONDS = 900.0


class PlanError(RuntimeError):
    """The server refused, lost or cut off a request; the message names workload and request."""


class Streams(Protocol):
    """The methods of a client that a plan needs."""

    async def stream_answers(
        self, prompt: Prompt, tokens: int, n: int, on_tokens: Callable[[int], None]
    ) -> list[Answer]:
        """See :meth:`deft_backend.tools.harness.client.Client.stream_answers`."""
        ...


@dataclass(frozen=True)
class Answered:
    """All answers to a plan, in its order, and the seconds that they took together."""

    plan: RequestPlan
    answers: tuple[Answer, ...]
    seconds: float


def answer_plan(
    plan: RequestPlan, url: str, on_tokens: Callable[[int], None] = lambda count: None
) -> Answered:
    """Warm the shared prompts, then send all requests of a plan of text prompts.

    Parameters
    ----------
    plan : RequestPlan
        The plan. Decoding is greedy and stops after exactly ``max_tokens``.
    url : str
        The server, without a path.
    on_tokens : callable
        Called with the number of new tokens whenever some arrive.

    Raises
    ------
    PlanError
        If a request fails or an answer has another length.
    """
    return asyncio.run(_answer_plan(plan, url, on_tokens))


async def _answer_plan(plan: RequestPlan, url: str, on_tokens: Callable[[int], None]) -> Answered:
    try:
        async with Client(url, TEXT, seconds=REQUEST_SECONDS) as client:
            for prompt in plan.warm:
                await client.stream_answers(prompt, 1)
            begin = time.perf_counter()
            answers = await send_requests(plan, client, on_tokens)
            return Answered(plan, tuple(answers), time.perf_counter() - begin)
    except ClientError as error:
        raise PlanError(f"{plan.workload}: {error}") from error


async def send_requests(
    plan: RequestPlan, client: Streams, on_tokens: Callable[[int], None] = lambda count: None
) -> list[Answer]:
    """Send a plan's requests, each as soon as the request that it continues has ended.

    Returns
    -------
    list of Answer
        In the plan's order.

    Raises
    ------
    PlanError
        If a request fails; the others are cancelled.
    """
    running: dict[str, asyncio.Task[tuple[Prompt, list[Answer]]]] = {}

    async def run(request: Request) -> tuple[Prompt, list[Answer]]:
        prompt = request.prompt
        if request.after is not None:
            earlier, above = await asyncio.shield(running[request.after])
            prompt = continued(earlier, above[0], prompt)
        return prompt, await _answers(plan, request, prompt, client, on_tokens)

    for request in plan.requests:
        running[request.name] = asyncio.create_task(run(request))
    try:
        done = await asyncio.gather(*running.values())
    except BaseException:
        for task in running.values():
            task.cancel()
        await asyncio.gather(*running.values(), return_exceptions=True)
        raise
    return [answer for _, answers in done for answer in answers]


def continued(prompt: Prompt, answer: Answer, then: Prompt) -> Prompt:
    """Join a prompt, its answer and the next part, as text or as token ids.

    Raises
    ------
    TypeError
        If one prompt is text and the other is token ids.
    """
    if isinstance(prompt, str) and isinstance(then, str):
        return prompt + answer.text + then
    if isinstance(prompt, tuple) and isinstance(then, tuple):
        return (*prompt, *answer.ids, *then)
    raise TypeError("a request of text continues one of token ids, or the other way round")


async def _answers(
    plan: RequestPlan,
    request: Request,
    prompt: Prompt,
    client: Streams,
    on_tokens: Callable[[int], None],
) -> list[Answer]:
    try:
        answers = await client.stream_answers(prompt, request.max_tokens, request.n, on_tokens)
    except ClientError as error:
        raise PlanError(f"{plan.workload}, {request.name}: {error}") from error
    for index, answer in enumerate(answers):
        answer.request, answer.index = request.name, index
    return answers
