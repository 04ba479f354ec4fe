"""One request to a server: send it, read its stream, and record what became of it."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from deft_backend.tools.harness.answers import Answer

if TYPE_CHECKING:
    import aiohttp

ANSWERED, TOO_LONG, REFUSED, FAILED, LOST, LATE, CUT, SKIPPED = (
    "answered", "too long", "refused", "failed", "lost", "timed out", "cut off", "not sent",
)  # fmt: skip
"""What can become of a request. ``refused``: status 4xx; ``failed``: 5xx, or an error in the
stream; ``lost``: the connection broke; ``cut off``: the run was interrupted; ``not sent``: the
server had died, or the run was interrupted before."""

_TOO_LONG = re.compile(r"context|too long|longer than|exceed|max_model_len|maximum", re.IGNORECASE)


class NotAnswered(RuntimeError):
    """A request without its answer; `status` is one of the above."""

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status


@asynccontextmanager
async def sent(
    session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Post a request; errors, also those inside the block, become :class:`NotAnswered`."""
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
        return NotAnswered(LOST, repr(error))
    if isinstance(error, ValueError | KeyError | TypeError | IndexError | AttributeError):
        return NotAnswered(FAILED, f"the stream cannot be read: {error!r}")
    return error


class StreamReader:
    """Collects the pieces of a stream; `ended`: the server said that it is complete."""

    def __init__(self, on_tokens: Callable[[int], None]) -> None:
        self._sent = time.perf_counter()
        self._answer = Answer(sent=self._sent)
        self._on_tokens = on_tokens
        self._prompt: int | None = None
        self._completion: int | None = None
        self.ended = False

    def take(self, content: Any) -> None:
        if "error" in content:
            raise NotAnswered(FAILED, str(content["error"])[:300])
        now = time.perf_counter() - self._sent
        usage = content.get("usage") or {}
        self._prompt = _whole(usage.get("prompt_tokens"), self._prompt)
        self._completion = _whole(usage.get("completion_tokens"), self._completion)
        answer = self._answer
        for choice in content.get("choices") or []:
            self.ended |= choice.get("finish_reason") is not None
            ids, text = choice.get("token_ids") or [], choice.get("text") or ""
            answer.ids.extend(ids)
            answer.text += text
            likely = choice.get("logprobs") or {}
            texts = likely.get("tokens") or []
            answer.logprobs.extend(likely.get("token_logprobs") or [])
            answer.top.extend(likely.get("top_logprobs") or [])
            fresh = len(texts) or len(ids)
            if not fresh and usage.get("completion_tokens"):
                fresh = int(usage["completion_tokens"]) - len(answer.arrivals)
            elif not fresh and text:
                fresh = 1
            if fresh > 0:
                # Without log-probabilities, a piece may hold several tokens and only their text.
                answer.tokens.extend(texts or [text, *[""] * (fresh - 1)])
                answer.arrivals.extend([now] * fresh)
                self._on_tokens(fresh)

    def end(self, tokens: int) -> tuple[Answer, int | None]:
        """The answer; raises if the stream ended without a token, or in the middle."""
        arrivals = self._answer.arrivals
        if not self.ended and len(arrivals) < tokens:
            said = f"the stream ended after {len(arrivals)} of {tokens} tokens"
            raise NotAnswered(LOST, f"{said}, without an end mark")
        if not arrivals:
            raise NotAnswered(FAILED, f"the stream ended without one of {tokens} tokens")
        # If pieces carry no counts, the last piece's count is right. Tokens of one piece share its
        # time.
        missing = (self._completion or 0) - len(arrivals)
        arrivals.extend([arrivals[-1]] * max(0, missing))
        return self._answer, self._prompt


def _whole(value: Any, before: int | None) -> int | None:
    return before if value is None else int(value)
