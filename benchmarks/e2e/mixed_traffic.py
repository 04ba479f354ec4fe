"""Minutes of mixed traffic: requests join, hang up, and evict each other from the cache.

Workers send one request after another: a question about one of many documents, or an unshared
prompt. The documents exceed the KV cache. Some clients hang up before the answer ends. A sample of
the answers is kept, to be checked against the host's own backend later (:mod:`checked_answers`).
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
from benchmarks.token_client.client import Client
from deft_backend.tools.harness.answers import Answer


@dataclass(frozen=True)
class Traffic:
    """The traffic to send.

    Attributes
    ----------
    minutes : float
        Time during which workers start requests.
    workers : int
        Requests in flight at the same time.
    documents, document_tokens : int
        Number of documents, and tokens of each. Together they should exceed the KV cache by far,
        so that the host evicts documents without recent questions.
    turnover : float
        Share of requests after which a new document replaces an old one.
    unshared : float
        Share of requests that share nothing.
    aborted : float
        Share of requests whose client hangs up early.
    most_question_tokens, most_answer_tokens : int
        Largest lengths; the lengths are uniform from 1 (answers: 2).
    samples : int
        Answers to keep for the check.
    part : int
        Number of this part of a longer run; each part sends other requests.
    """

    minutes: float
    workers: int = 64
    documents: int = 48
    document_tokens: int = 16384
    turnover: float = 0.01
    unshared: float = 0.2
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
    """The result of the traffic.

    Attributes
    ----------
    finished, aborted : int
        Requests that ended, and that hung up.
    failures : list of str
        One line for each failed request.
    tokens : int
        Output tokens.
    evicted : int, optional
        Questions about an earlier document of which the host's cache held less than half. None if
        the host does not report cached tokens.
    samples : list
        Prompts and answers for the check.
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
        """The result as a row holds it."""
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
    """Send traffic for its minutes, then wait for the requests in flight.

    Parameters
    ----------
    alive : callable
        Raises if the server has ended, which ends the traffic.
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
    """Choose one request, send it, and count its answer."""
    question = draw(choose, model, choose.randint(1, traffic.most_question_tokens))
    tokens = choose.randint(2, traffic.most_answer_tokens)
    leave_after = choose.randint(1, tokens - 1) if choose.random() < traffic.aborted else None
    document = None if choose.random() < traffic.unshared else _popular(choose, documents)
    if choose.random() < traffic.turnover:
        place = choose.randrange(len(documents))
        documents[place] = _Document(draw(choose, model, traffic.document_tokens))
    prompt = question if document is None else document.ids + question
    before = document.asked if document is not None else 0
    try:
        answer = await client.stream(prompt, tokens, leave_after=leave_after)
    except Exception as error:
        seen.failures.append(f"{len(prompt)} + {tokens} tokens: {error}"[:300])
        await asyncio.sleep(0.1)  # do not flood a server that refuses everything
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
    """A document by Zipf's law: a batch shares the first ones, and the host evicts the others."""
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
    """Keep each finished answer with equal probability (reservoir sampling)."""
    if len(seen.samples) < traffic.samples:
        seen.samples.append((prompt, answer.ids))
        return
    place = choose.randrange(seen.finished)
    if place < traffic.samples:
        seen.samples[place] = (prompt, answer.ids)
