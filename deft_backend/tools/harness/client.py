"""A client of the hosts' servers, by OpenAI's completions."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from deft_backend.tools.harness.answers import (
    FAILED,
    Answer,
    NotAnswered,
    Prompt,
    StreamReader,
    reason,
    sent,
)

if TYPE_CHECKING:
    import aiohttp

_FIELDS: Mapping[str, Any] = {
    "ignore_eos": True,
    "return_token_ids": True,
    "stream_options": {"include_usage": True},
}
"""Besides OpenAI's: answers have the tokens asked for, and show their ids."""


class ServerError(RuntimeError):
    """The server at this address cannot be used at all."""


@dataclass(frozen=True)
class Offers:
    model: str
    context: int | None  # tokens of prompt and answer that it takes
    characters_a_token: float  # of the sample text


def base_url(address: str) -> str:
    """``host:port`` or a URL, with or without ``/v1``, as a URL without a path.

    >>> base_url("127.0.0.1:30000"), base_url("https://a.example/v1/")
    ('http://127.0.0.1:30000', 'https://a.example')
    """
    url = address if "://" in address else f"http://{address}"
    url = url.rstrip("/").removesuffix("/v1")
    if not re.fullmatch(r"https?://[^\s/?#]+(/[^\s?#]*)?", url):
        raise ServerError(f"{address!r} is not an address; expected http://HOST:PORT")
    try:
        _ = urlsplit(url).port
    except ValueError:
        raise ServerError(f"{address!r} has no port between 0 and 65535") from None
    return url


class ServerClient:
    """A client of the server at `url`; an asynchronous context manager. `fields` are further fields
    of every completion, such as SGLang's ``lora_path``.
    """

    def __init__(
        self,
        url: str,
        *,
        seconds: float = 900.0,
        logprobs: bool = False,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        self.url = url
        self._fields = dict(fields or {})
        self.logprobs = logprobs
        self.model = ""
        self._seconds = seconds
        self._session: aiohttp.ClientSession  # inside the context

    async def __aenter__(self) -> ServerClient:
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
        await self._session.close()

    async def offers(self, model: str | None, sample: str) -> Offers:
        """The server's model, context and fields; raises ServerError if it has no such model."""
        listed = await self.models()
        names = [str(entry.get("id")) for entry in listed]
        if model is not None and model not in names:
            raise ServerError(f"{self.url} has no model {model!r}; it lists {', '.join(names)}")
        self.model = model or names[0]
        context = listed[names.index(self.model)].get("max_model_len")
        try:
            await self.ask("Hello", 2)
        except NotAnswered as error:
            said = f"{self.url}/v1/completions does not answer: {error}"
            raise ServerError(said) from error
        tokens = await self._count(sample)
        ratio = len(sample) / tokens if tokens else 4.0
        known = context if isinstance(context, int) else None
        return Offers(self.model, known, ratio)

    async def lives(self) -> bool:
        try:
            await self.models()
        except ServerError:
            return False
        return True

    async def ask(
        self,
        prompt: Prompt,
        tokens: int,
        on_tokens: Callable[[int], None] = lambda count: None,
        *,
        temperature: float = 0.0,
        leave_after: int | None = None,
        into: Answer | None = None,
    ) -> tuple[Answer, int | None]:
        """A streamed answer of `tokens` tokens, added to `into`, and the server's count of the
        prompt's tokens. After `leave_after` tokens it hangs up, which aborts the request. Raises
        NotAnswered.
        """
        body = {**self._body(prompt, tokens), "stream": True, "temperature": temperature, **_FIELDS}
        if self.logprobs:
            body["logprobs"] = 2
        reader = StreamReader(on_tokens, Answer() if into is None else into)
        async with sent(self._session, f"{self.url}/v1/completions", body) as response:
            async for line in response.content:
                if line.startswith(b"data: [DONE]"):
                    reader.ended = True
                elif line.startswith(b"data: "):
                    reader.take(json.loads(line[6:]))
                    if leave_after is not None and len(reader.answer.arrivals) >= leave_after:
                        response.close()
                        return reader.answer, None
        return reader.end(tokens)

    async def batch(
        self, prompts: Sequence[Prompt], tokens: int, *, likeliest: int = 0
    ) -> list[Answer]:
        """Greedy answers to several prompts in one request, not streamed; raises NotAnswered."""
        body = {
            **self._body(prompts[0], tokens),
            "ignore_eos": True,
            "return_token_ids": True,
            "prompt": [prompt if isinstance(prompt, str) else list(prompt) for prompt in prompts],
        }
        if likeliest:
            body |= {"logprobs": likeliest, "return_tokens_as_token_ids": True}
        content = await self.post("/v1/completions", body)
        choices = sorted(content["choices"], key=lambda choice: int(choice["index"]))
        answers = [Answer() for _ in choices]
        for answer, choice in zip(answers, choices, strict=True):
            answer.add(choice)
        found = sorted({len(answer.ids) for answer in answers})
        if len(answers) != len(prompts) or found != [tokens]:
            raise NotAnswered(
                FAILED,
                f"asked for {len(prompts)} answers of {tokens} tokens, got {len(answers)} of "
                f"{found}; do prompt and answer fit the model's context and the KV cache?",
            )
        return answers

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        async with sent(self._session, f"{self.url}{path}", {**body, **self._fields}) as response:
            content = await response.read()
            return json.loads(content) if content.startswith((b"{", b"[")) else None

    def _body(self, prompt: Prompt, tokens: int) -> dict[str, Any]:
        return {
            "model": self.model,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "max_tokens": tokens,
            "temperature": 0.0,
            **self._fields,
        }

    async def margin(self, prompt: Prompt, answer: Sequence[int]) -> float | None:
        """How far the likeliest token is ahead of the second, behind an answer's ids; or None."""
        try:
            told = await self._whole(prompt, 1, return_token_ids=True)
            ids = (*told["choices"][0]["prompt_token_ids"], *answer)
            content = await self._whole(ids, 1, logprobs=2)
            likely = sorted(content["choices"][0]["logprobs"]["top_logprobs"][0].values())
            return float(likely[-1] - likely[-2])
        except (NotAnswered, KeyError, IndexError, TypeError, ValueError):
            return None

    async def _count(self, sample: str) -> int | None:
        try:
            return int((await self._whole(sample, 1))["usage"]["prompt_tokens"])
        except (NotAnswered, KeyError, TypeError, ValueError):
            return None

    async def _whole(self, prompt: Prompt, tokens: int, **fields: Any) -> Any:
        return await self.post("/v1/completions", self._body(prompt, tokens) | fields)

    async def models(self) -> list[dict[str, Any]]:
        import aiohttp

        try:
            limit = aiohttp.ClientTimeout(total=10)
            async with self._session.get(f"{self.url}/v1/models", timeout=limit) as response:
                if response.status in (401, 403):
                    said = f"{self.url} wants a key (status {response.status})"
                    raise ServerError(f"{said}; set OPENAI_API_KEY to it")
                if response.status != 200:
                    raise ServerError(f"{self.url}/v1/models returns status {response.status}")
                listed = (await response.json(content_type=None))["data"]
                if not listed:
                    raise ServerError(f"{self.url} lists no model under /v1/models")
                return [dict(entry) for entry in listed]
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError) as error:
            raise ServerError(
                f"{self.url} does not answer under /v1/models; is it running? ({reason(error)})"
            ) from error
        except (ValueError, KeyError, TypeError) as error:
            raise ServerError(f"{self.url}/v1/models is not a list of models: {error!r}") from error
