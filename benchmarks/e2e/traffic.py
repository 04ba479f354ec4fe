"""Mixed traffic for minutes: requests that join, are aborted, and push each other out of the cache.

Workers send one request after another: a question about one of more documents than the KV cache
holds, or a prompt of its own. Some hang up while their answer comes. A sample of the answers is
kept, to be checked against the host's own backend later (:mod:`checked_answers`).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.e2e.batch_timing import milliseconds
from benchmarks.e2e.prompt_cases import draw, percentile
from benchmarks.e2e.served_model import Model
from deft_backend.harness.answers import Answer
from deft_backend.harness.client import Client


@dataclass(frozen=True)
class Traffic:
    """What is sent.

    Attributes
    ----------
    minutes : float
        How long requests are started.
    workers : int
        Requests under way at once.
    documents, document_tokens : int
        Texts that questions are about. Their tokens should exceed the KV cache by far: what is
        not asked about for a while is then evicted.
    turnover : float
        Share of requests after which a document is replaced by a new one.
    loners : float
        Share of requests with a prompt of their own.
    aborted : float
        Share of requests whose client hangs up before the end.
    most_question_tokens, most_answer_tokens : int
        Lengths are drawn evenly from 1 (answers: 2) up to these.
    samples : int
        Answers kept to be checked.
    part : int
        Traffic of another part is other traffic.
    """

    minutes: float
    workers: int = 64
    documents: int = 48
    document_tokens: int = 16384
    turnover: float = 0.01
    loners: float = 0.2
    aborted: float = 0.1
    most_question_tokens: int = 256
    most_answer_tokens: int = 256
    samples: int = 200
    part: int = 1

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return self.document_tokens + self.most_question_tokens + self.most_answer_tokens


@dataclass
class Seen:
    """What came of it.

    Attributes
    ----------
    finished, aborted : int
        Requests.
    failures : list of str
        What went wrong, a line a request.
    tokens : int
        Output tokens.
    evicted : int, optional
        Questions about a document asked about before, of which the host had kept less than half;
        None where the host does not say what it had kept.
    samples : list
        Prompt and answer of the requests to check.
    """

    finished: int = 0
    aborted: int = 0
    failures: list[str] = field(default_factory=list)
    tokens: int = 0
    evicted: int | None = None
    seconds: float = 0.0
    firsts: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    samples: list[tuple[tuple[int, ...], list[int]]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """For a row."""
        return {
            "finished": self.finished, "aborted": self.aborted, "failures": len(self.failures),
            "first_failures": self.failures[:5], "seconds": round(self.seconds, 1),
            "evicted": self.evicted, "sampled": len(self.samples),
            "ttft_p50_ms": milliseconds(percentile(self.firsts, 0.5)),
        }  # fmt: skip


@dataclass
class _Document:
    ids: tuple[int, ...]
    asked: int = 0


async def drive(
    traffic: Traffic,
    model: Model,
    client: Client,
    *,
    alive: Callable[[], object],
    clock: Callable[[], float] = time.monotonic,
) -> Seen:
    """Send traffic for its minutes, then wait for what is under way.

    Parameters
    ----------
    alive : callable
        Raises when the server has ended: there is no point in going on then.
    clock : callable
        Seconds.
    """
    choose = random.Random(f"traffic {traffic.part}")
    documents = [
        _Document(draw(choose, model, traffic.document_tokens)) for _ in range(traffic.documents)
    ]
    seen = Seen()
    begin = clock()
    end = begin + traffic.minutes * 60

    async def work() -> None:
        while clock() < end and len(seen.failures) < 100:
            await _one(traffic, model, documents, choose, client, seen)
            if seen.failures:
                alive()

    workers = [asyncio.create_task(work()) for _ in range(traffic.workers)]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    seen.seconds = clock() - begin
    return seen


async def _one(
    traffic: Traffic,
    model: Model,
    documents: list[_Document],
    choose: random.Random,
    client: Client,
    seen: Seen,
) -> None:
    """One request, from its choice to its answer."""
    question = draw(choose, model, choose.randint(1, traffic.most_question_tokens))
    tokens = choose.randint(2, traffic.most_answer_tokens)
    leave_after = choose.randint(1, tokens - 1) if choose.random() < traffic.aborted else None
    document = None if choose.random() < traffic.loners else _popular(choose, documents)
    if choose.random() < traffic.turnover:
        place = choose.randrange(len(documents))
        documents[place] = _Document(draw(choose, model, traffic.document_tokens))
    prompt = question if document is None else document.ids + question
    before = document.asked if document is not None else 0
    try:
        answer = await client.stream(prompt, tokens, leave_after=leave_after)
    except Exception as error:
        seen.failures.append(f"{len(prompt)} + {tokens} tokens: {error}"[:300])
        await asyncio.sleep(0.1)  # a server that refuses everything is not to be flooded
        return
    if leave_after is not None:
        seen.aborted += 1
        return
    if document is not None:
        if before and answer.cached is not None:
            seen.evicted = (seen.evicted or 0) + (answer.cached < traffic.document_tokens // 2)
        document.asked += 1
    _count(seen, answer)
    _sample(traffic, choose, seen, prompt, answer)


def _popular(choose: random.Random, documents: list[_Document]) -> _Document:
    """A document, the first ones oftenest (Zipf's law): some are shared by a batch, most are cold.

    What is asked about rarely is what the host evicts.
    """
    weights = [1 / rank for rank in range(1, len(documents) + 1)]
    return choose.choices(documents, weights)[0]


def _count(seen: Seen, answer: Answer) -> None:
    seen.finished += 1
    seen.tokens += len(answer.ids)
    if len(seen.firsts) < 100_000:
        seen.firsts.append(answer.arrivals[0])
        seen.gaps.extend(answer.gaps[:8])


def _sample(
    traffic: Traffic,
    choose: random.Random,
    seen: Seen,
    prompt: tuple[int, ...],
    answer: Answer,
) -> None:
    """Keep each finished answer with the same chance (reservoir sampling)."""
    if len(seen.samples) < traffic.samples:
        seen.samples.append((prompt, answer.ids))
        return
    place = choose.randrange(seen.finished)
    if place < traffic.samples:
        seen.samples[place] = (prompt, answer.ids)
