"""A client of any server that speaks OpenAI's completions, whatever it leaves out."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deft_backend.harness.answers import Answer

if TYPE_CHECKING:
    import aiohttp

ANSWERED, TOO_LONG, REFUSED, FAILED, LOST, LATE, CUT, SKIPPED = (
    "answered", "too long", "refused", "failed", "lost", "timed out", "cut off", "not sent",
)  # fmt: skip
"""What can become of a request. ``refused``: status 4xx; ``failed``: 5xx, or an error in the
stream; ``lost``: the connection broke; ``cut off``: the run was interrupted; ``not sent``: the
server had died, or the run was interrupted before."""

STATUSES = (ANSWERED, TOO_LONG, REFUSED, FAILED, LOST, LATE, CUT, SKIPPED)

_USAGE = {"include_usage": True}
_FIELDS: tuple[Mapping[str, Any], ...] = (
    {"ignore_eos": True, "return_token_ids": True,
     "stream_options": {**_USAGE, "continuous_usage_stats": True}},
    {"ignore_eos": True, "stream_options": _USAGE},
    {"stream_options": _USAGE},
    {},
)  # fmt: skip
"""Fields of a request beyond OpenAI's first ones, the most useful set first."""

_TOO_LONG = re.compile(r"context|too long|longer than|exceed|max_model_len|maximum", re.IGNORECASE)


class LiveError(RuntimeError):
    """The server at this address cannot be used at all."""


class NotAnswered(RuntimeError):
    """A request without its answer; `status` is one of :data:`STATUSES`."""

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status


@dataclass(frozen=True)
class Offers:
    """What a server said about itself.

    Attributes
    ----------
    model : str
    context : int, optional
        Tokens of prompt and answer that it takes.
    level : int
        The first set of :data:`_FIELDS` that it accepts; higher sets have fewer fields.
    characters_a_token : float
        Of the sample text.
    """

    model: str
    context: int | None
    level: int
    characters_a_token: float

    @property
    def exact_lengths(self) -> bool:
        """Whether answers have exactly the requested tokens."""
        return "ignore_eos" in _FIELDS[self.level]


def base_url(address: str) -> str:
    """``host:port`` or a URL, with or without ``/v1``, as a URL without a path.

    >>> base_url("127.0.0.1:30000"), base_url("https://a.example/v1/")
    ('http://127.0.0.1:30000', 'https://a.example')
    """
    url = address if "://" in address else f"http://{address}"
    url = url.rstrip("/").removesuffix("/v1")
    if not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", url):
        raise LiveError(f"{address!r} is no address; expected http://HOST:PORT")
    return url


class LiveClient:
    """A client of one server; an asynchronous context manager.

    Parameters
    ----------
    url : str
        The server, without ``/v1``.
    seconds : float
        Time limit of one request.
    """

    def __init__(self, url: str, *, seconds: float = 900.0) -> None:
        self.url = url
        self.level = 0
        self.model = ""
        self._seconds = seconds
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> LiveClient:
        import aiohttp

        key = os.environ.get("OPENAI_API_KEY")
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=self._seconds, sock_connect=30),
            headers={"Authorization": f"Bearer {key}"} if key else {},
            read_bufsize=2**22,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def offers(self, model: str | None, sample: str) -> Offers:
        """Ask the server for its model, its context and the fields that it takes.

        Parameters
        ----------
        model : str, optional
            The model to ask for, if the server has several.
        sample : str
            A text whose tokens the server counts.

        Raises
        ------
        LiveError
            If it does not answer, or has no such model.
        """
        listed = await self._models()
        names = [str(entry.get("id")) for entry in listed]
        if model is not None and model not in names:
            raise LiveError(f"{self.url} has no model {model!r}; it lists {', '.join(names)}")
        self.model = model or names[0]
        context = listed[names.index(self.model)].get("max_model_len")
        await self._find_level()
        tokens = await self._count(sample)
        ratio = len(sample) / tokens if tokens else 4.0
        return Offers(self.model, context if isinstance(context, int) else None, self.level, ratio)

    async def lives(self) -> bool:
        """Whether the server still answers."""
        try:
            await self._models()
        except LiveError:
            return False
        return True

    async def ask(
        self, prompt: str, tokens: int, n: int = 1,
        on_tokens: Callable[[int], None] = lambda count: None,
    ) -> tuple[list[Answer], int | None]:  # fmt: skip
        """Greedy answers of `tokens` tokens, and the prompt's tokens by the server's count.

        Raises
        ------
        NotAnswered
        """
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0.0,
            "stream": True, **_FIELDS[self.level],
        }  # fmt: skip
        if n > 1:  # some servers refuse several answers at temperature 0; this is the same
            body |= {"n": n, "temperature": 1.0, "top_k": 1}
        reader = _Reader(n, on_tokens)
        async with _Sent(self._open(), f"{self.url}/v1/completions", body) as response:
            async for line in response.content:
                if line.startswith(b"data: ") and not line.startswith(b"data: [DONE]"):
                    reader.take(json.loads(line[6:]))
        return reader.end(tokens)

    async def margin(self, prompt: str) -> float | None:
        """Log-probability of the likeliest next token minus the second one's; None if unknown."""
        body = {
            "model": self.model, "prompt": prompt, "max_tokens": 1, "temperature": 0.0,
            "logprobs": 2,
        }  # fmt: skip
        try:
            async with _Sent(self._open(), f"{self.url}/v1/completions", body) as response:
                content = json.loads(await response.read())
            likely = sorted(content["choices"][0]["logprobs"]["top_logprobs"][0].values())
            return float(likely[-1] - likely[-2])
        except (NotAnswered, KeyError, IndexError, TypeError, ValueError):
            return None

    async def _find_level(self) -> None:
        """Find the first set of fields that the server accepts."""
        said = ""
        for self.level in range(len(_FIELDS)):
            try:
                await self.ask("Hello", 2)
                return
            except NotAnswered as error:
                said = str(error)
                if error.status not in (REFUSED, TOO_LONG):
                    break
        raise LiveError(f"{self.url}/v1/completions does not answer: {said}")

    async def _count(self, sample: str) -> int | None:
        body = {"model": self.model, "prompt": sample, "max_tokens": 1, "temperature": 0.0}
        try:
            async with _Sent(self._open(), f"{self.url}/v1/completions", body) as response:
                return int(json.loads(await response.read())["usage"]["prompt_tokens"])
        except (NotAnswered, KeyError, TypeError, ValueError):
            return None

    async def _models(self) -> list[Any]:
        import aiohttp

        try:
            limit = aiohttp.ClientTimeout(total=10)
            async with self._open().get(f"{self.url}/v1/models", timeout=limit) as response:
                if response.status != 200:
                    raise LiveError(f"{self.url}/v1/models answers {response.status}")
                listed = (await response.json(content_type=None))["data"]
                if not listed:
                    raise LiveError(f"{self.url} lists no model under /v1/models")
                return list(listed)
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise LiveError(f"{self.url} does not answer: {error!r}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise LiveError(f"{self.url}/v1/models is no list of models: {error!r}") from error

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the client is used outside of its context")
        return self._session


class _Sent:
    """A posted request; errors inside the block become :class:`NotAnswered`."""

    def __init__(self, session: aiohttp.ClientSession, url: str, body: Mapping[str, Any]) -> None:
        self._request = session.post(url, json=body)

    async def __aenter__(self) -> aiohttp.ClientResponse:
        try:
            self._response = await self._request.__aenter__()
            if self._response.status != 200:
                said = (await self._response.text())[:300]
                await self._request.__aexit__(None, None, None)
                raise _refused(self._response.status, said)
        except NotAnswered:
            raise
        except Exception as error:
            raise _broken(error) from error
        return self._response

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        await self._request.__aexit__(kind, error, trace)
        if isinstance(error, Exception) and not isinstance(error, NotAnswered):
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
    if isinstance(error, ValueError | KeyError | TypeError | IndexError):
        return NotAnswered(FAILED, f"the stream cannot be read: {error!r}")
    return error


class _Reader:
    """Collects the pieces of a stream."""

    def __init__(self, n: int, on_tokens: Callable[[int], None]) -> None:
        self._sent = time.perf_counter()
        self._answers = [Answer(sent=self._sent, index=at) for at in range(n)]
        self._on_tokens = on_tokens
        self._prompt: int | None = None
        self._completion: int | None = None

    def take(self, content: Any) -> None:
        if "error" in content:
            raise NotAnswered(FAILED, str(content["error"])[:300])
        now = time.perf_counter() - self._sent
        usage = content.get("usage") or {}
        self._prompt = usage.get("prompt_tokens", self._prompt)
        self._completion = usage.get("completion_tokens", self._completion)
        for choice in content.get("choices") or []:
            answer = self._answers[choice.get("index") or 0]
            ids, text = choice.get("token_ids") or [], choice.get("text") or ""
            answer.ids.extend(ids)
            answer.text += text
            fresh = len(ids)
            if not fresh and len(self._answers) == 1 and usage.get("completion_tokens"):
                fresh = int(usage["completion_tokens"]) - len(answer.arrivals)
            elif not fresh and text:
                fresh = 1
            if fresh > 0:
                answer.tokens.extend([text] + [""] * (fresh - 1))  # a piece may hold several tokens
                answer.arrivals.extend([now] * fresh)
                self._on_tokens(fresh)

    def end(self, tokens: int) -> tuple[list[Answer], int | None]:
        """The answers; raises if the stream ended without a token."""
        for answer in self._answers:
            if not answer.arrivals:
                raise NotAnswered(FAILED, f"the stream ended without one of {tokens} tokens")
        if len(self._answers) == 1 and self._completion:
            # Servers without counts in each piece: the last piece's count is right, and the times
            # are those of pieces.
            arrivals = self._answers[0].arrivals
            missing = int(self._completion) - len(arrivals)
            arrivals.extend([arrivals[-1]] * max(0, missing))
        return self._answers, self._prompt
