"""An answer as a client receives it, and the comparison of two answers to one prompt."""

from __future__ import annotations

import asyncio
import os
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import aiohttp


Prompt = str | tuple[int, ...]  # text, or token ids

EIGHT_BITS = 3.0
"""How many times larger a near tie may be with a KV cache of 8 bits. Where the noise of the layers
below moves a key or a value over the middle of two numbers, the cache holds the other number: in
e4m3, 6 to 12 % away. The hosts' own backends also round queries and probabilities to 8 bits. With
three times bfloat16's 0.26, none of a soak's 26,281 tokens was wrong
(soak-h100.json)."""


@dataclass
class Answer:
    request: str = ""  # name of the request
    ids: list[int] = field(default_factory=list)
    text: str = ""  # servers without a tokenizer give none
    # Seconds from sending the request to each token; empty unless the answer was streamed.
    arrivals: list[float] = field(default_factory=list)
    sent: float = 0.0  # time of sending, on :func:`time.perf_counter`'s clock
    # Text and log-probability of each token, if the client asked for it.
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    # For each token, the log-probabilities of the likeliest ones, by id or by text.
    top: list[Mapping[Any, float]] = field(default_factory=list)
    # Tokens of the prompt that the host found in its prefix cache, if it reports them.
    cached: int | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, choice: Mapping[str, Any]) -> int:
        """Add a choice of a response, whole or a piece of it, and return how many tokens it has."""
        ids, likely = choice.get("token_ids") or [], choice.get("logprobs") or {}
        self.ids.extend(ids)
        self.text += choice.get("text") or ""
        self.tokens.extend(likely.get("tokens") or [])
        self.logprobs.extend(likely.get("token_logprobs") or [])
        self.top.extend(likely.get("top_logprobs") or [])
        return len(ids)

    @property
    def ttft(self) -> float:
        return self.arrivals[0]

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, in seconds; None for a single token."""
        later = len(self.arrivals) - 1
        return (self.arrivals[-1] - self.arrivals[0]) / later if later else None

    def margin(self, position: int) -> float:
        """How far the token's log-probability exceeds the second likeliest one's; 0 if unknown."""
        if position >= len(self.top) or len(self.top[position]) < 2:
            return 0.0
        return self.logprobs[position] - sorted(self.top[position].values())[-2]


def first_difference(left: Sequence[object], right: Sequence[object]) -> int | None:
    """Index of the first element that differs; None if one sequence is a prefix of the other."""
    pairs = enumerate(zip(left, right, strict=False))
    return next((i for i, (a, b) in pairs if a != b), None)


ANSWERED, TOO_LONG, REFUSED, FAILED = "answered", "too long", "refused", "failed"
LOST, LATE, CUT, SKIPPED = "lost", "timed out", "cut off", "not sent"
"""What can become of a request. ``refused``: status 4xx; ``failed``: 5xx, or an error in the
stream; ``lost``: the connection broke; ``cut off``: the run was interrupted; ``not sent``: the
server had died, or the run was interrupted before."""

_TOO_LONG = re.compile(r"context|too long|longer than|exceed|max_model_len|maximum", re.IGNORECASE)


class NotAnswered(RuntimeError):
    def __init__(self, status: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status


@asynccontextmanager
async def sent(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]
) -> AsyncIterator[aiohttp.ClientResponse]:
    try:
        async with session.post(url, json=body) as response:
            if response.status != 200:
                raise _refused(response.status, (await response.text())[:300])
            yield response
    except NotAnswered:
        raise
    except Exception as error:
        raise _broken(error) from error


def _refused(status: int, said: str) -> NotAnswered:
    if status in (400, 413, 422) and _TOO_LONG.search(said):
        return NotAnswered(TOO_LONG, f"{status}: {said}")
    return NotAnswered(REFUSED if status < 500 else FAILED, f"{status}: {said}")


def _broken(error: Exception) -> Exception:
    import aiohttp

    if isinstance(error, asyncio.TimeoutError):
        return NotAnswered(LATE, "no answer in time")
    if isinstance(error, aiohttp.ClientError | OSError):
        return NotAnswered(LOST, reason(error))
    if isinstance(error, ValueError | KeyError | TypeError | IndexError | AttributeError):
        return NotAnswered(FAILED, f"the stream cannot be read: {error!r}")
    return error


def reason(error: BaseException) -> str:
    cause = getattr(error, "os_error", error)
    code = getattr(cause, "errno", None)
    if isinstance(code, int) and code > 0:
        return os.strerror(code)
    return str(cause) or type(cause).__name__


class StreamReader:
    """Collects the pieces of a stream in `answer`; `ended`: the server said that it is complete."""

    def __init__(self, on_tokens: Callable[[int], None], answer: Answer) -> None:
        self._sent = time.perf_counter()
        self.answer = answer
        self.answer.sent = self._sent
        self._on_tokens = on_tokens
        self._prompt: int | None = None
        self.ended = False

    def take(self, content: Any) -> None:
        if "error" in content:
            raise NotAnswered(FAILED, str(content["error"])[:300])
        now = time.perf_counter() - self._sent
        usage = content.get("usage") or {}
        self._prompt = _whole(usage.get("prompt_tokens"), self._prompt)
        answer = self.answer
        details = usage.get("prompt_tokens_details") or {}
        answer.cached = _whole(details.get("cached_tokens"), answer.cached)
        for choice in content.get("choices") or []:
            self.ended |= choice.get("finish_reason") is not None
            if fresh := answer.add(choice):
                answer.arrivals.extend([now] * fresh)
                self._on_tokens(fresh)

    def end(self, tokens: int) -> tuple[Answer, int | None]:
        arrivals = self.answer.arrivals
        if not self.ended and len(arrivals) < tokens:
            said = f"the stream ended after {len(arrivals)} of {tokens} tokens"
            raise NotAnswered(LOST, f"{said}, without an end mark")
        if not arrivals:
            said = f"the stream ended without one of {tokens} tokens"
            if self.answer.text:
                said = "the text came without token ids, which SGLang and vLLM give"
            raise NotAnswered(FAILED, said)
        return self.answer, self._prompt


def _whole(value: Any, before: int | None) -> int | None:
    return before if value is None else int(value)
