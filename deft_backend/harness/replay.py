"""Sends a plan of requests to a server with the `openai` client and times every token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from deft_backend.harness.request_plan import Request, RequestPlan

TIMEOUT_SECONDS = 900.0


class ReplayError(RuntimeError):
    """A request was refused, lost or cut off; names the workload and the request."""


@dataclass
class Answer:
    """One answer as it came in.

    Attributes
    ----------
    request, index : str, int
        The request's name and which of its ``n`` answers this is.
    token_ids, tokens : list
        Ids (empty if the server gives none) and texts of the tokens.
    logprobs : list of float
        Log-probability of each token.
    margins : list of float
        How far each token's log-probability is above the next best one's.
    arrivals : list of float
        Seconds from sending the request to each token.
    """

    request: str
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        """Time to first token, in seconds."""
        return self.arrivals[0]

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, in seconds; None for a single token."""
        later = len(self.arrivals) - 1
        return (self.arrivals[-1] - self.arrivals[0]) / later if later else None


@dataclass(frozen=True)
class Replayed:
    """All answers to a plan, in its order, and how long they took together."""

    plan: RequestPlan
    answers: tuple[Answer, ...]
    seconds: float


def replay(
    plan: RequestPlan, url: str, on_tokens: Callable[[int], None] = lambda count: None
) -> Replayed:
    """Warm the shared prompts, then send all requests of the plan as it says.

    Parameters
    ----------
    plan : RequestPlan
        What to send. Decoding is greedy and goes on to exactly ``max_tokens``.
    url : str
        The server, without ``/v1``.
    on_tokens : callable
        Called with the number of tokens of every piece that arrives.

    Raises
    ------
    ReplayError
        If a request fails or an answer is not as long as was asked for.
    """
    return asyncio.run(_replay(plan, url, on_tokens))


async def _replay(plan: RequestPlan, url: str, on_tokens: Callable[[int], None]) -> Replayed:
    import httpx
    from openai import AsyncOpenAI

    # Nothing from the environment: neither a proxy nor somebody's key is for a local server.
    async with (
        httpx.AsyncClient(trust_env=False, timeout=TIMEOUT_SECONDS) as http,
        AsyncOpenAI(
            base_url=f"{url}/v1", api_key="unused", http_client=http, max_retries=0
        ) as client,
    ):
        try:
            model = (await client.models.list()).data[0].id
        except Exception as error:
            raise ReplayError(f"{url} does not list its model: {error}") from error
        session = _Session(client, model, plan.workload, on_tokens)
        for number, prompt in enumerate(plan.warm):
            await session.ask(Request(f"warm-up {number}", prompt, 1), prompt, count=False)
        begin = time.perf_counter()
        answers = await _send_all(plan, session)
        return Replayed(plan, tuple(answers), time.perf_counter() - begin)


async def _send_all(plan: RequestPlan, session: _Session) -> list[Answer]:
    running: dict[str, asyncio.Task[tuple[str, list[Answer]]]] = {}

    async def run(request: Request) -> tuple[str, list[Answer]]:
        context = ""
        if request.after is not None:
            prompt, above = await asyncio.shield(running[request.after])
            context = prompt + above[0].text
        prompt = context + request.prompt
        return prompt, await session.ask(request, prompt)

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


@dataclass(frozen=True)
class _Session:
    client: Any
    model: str
    workload: str
    on_tokens: Callable[[int], None]

    async def ask(self, request: Request, prompt: str, *, count: bool = True) -> list[Answer]:
        answers = [Answer(request.name, index) for index in range(request.n)]
        begin = time.perf_counter()
        try:
            stream = await self.client.completions.create(
                model=self.model,
                prompt=prompt,
                max_tokens=request.max_tokens,
                n=request.n,
                logprobs=2,
                stream=True,
                **_greedy(request.n),
            )
            async for chunk in stream:
                now = time.perf_counter() - begin
                for choice in chunk.choices:
                    arrived = _take(answers[choice.index], choice, now)
                    if count:
                        self.on_tokens(arrived)
        except Exception as error:
            raise ReplayError(f"{self.workload}, {request.name}: {error}") from error
        for answer in answers:
            if len(answer.tokens) != request.max_tokens:
                raise ReplayError(
                    f"{self.workload}, {request.name}: answer {answer.index} has "
                    f"{len(answer.tokens)} tokens; expected {request.max_tokens}. Does the "
                    "model's context length hold prompt and answer?"
                )
        return answers


def _greedy(answers: int) -> dict[str, Any]:
    """Sampling that always takes the likeliest token, and the rest of the body.

    vLLM refuses several answers at temperature 0; the likeliest one token only is the same.
    """
    body: dict[str, Any] = {"ignore_eos": True, "return_token_ids": True}
    if answers == 1:
        return {"temperature": 0.0, "extra_body": body}
    return {"temperature": 1.0, "extra_body": {**body, "top_k": 1}}


def _take(answer: Answer, choice: Any, now: float) -> int:
    """Add a streamed piece to its answer; return how many tokens it held."""
    answer.text += choice.text or ""
    answer.token_ids.extend((choice.model_extra or {}).get("token_ids") or [])
    found = choice.logprobs
    if found is None or not found.tokens:
        return 0
    answer.tokens.extend(found.tokens)
    answer.logprobs.extend(found.token_logprobs)
    answer.arrivals.extend([now] * len(found.tokens))
    for chosen, best in zip(found.token_logprobs, found.top_logprobs or [], strict=False):
        others = sorted(best.values(), reverse=True)
        answer.margins.append(chosen - others[1] if len(others) > 1 else 0.0)
    return len(found.tokens)
