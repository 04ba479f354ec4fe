"""Prompts of token ids to a host's own endpoint: whole batches at once, or streamed one by one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deft_backend.harness.dialects import (
    ClientError,
    Completion,
    Dialect,
    Prompt,
    SGLangDialect,
    VLLMDialect,
)

if TYPE_CHECKING:
    import aiohttp

__all__ = ["Client", "ClientError", "Completion"]

REQUEST_SECONDS = 580.0


class Client:
    """A client of one server; an asynchronous context manager.

    Both hosts' own endpoints are spoken: SGLang's ``/generate`` and vLLM's ``/v1/completions``.
    Decoding is greedy and goes on to exactly the length asked for.

    Parameters
    ----------
    url : str
        The server, without a path.
    host : str
        ``sglang`` or ``vllm``.
    fields : mapping, optional
        Further fields of every request, such as SGLang's ``lora_path``.
    """

    def __init__(self, url: str, host: str, fields: Mapping[str, Any] | None = None) -> None:
        self._url = url
        self._fields = dict(fields or {})
        self._dialect: Dialect = VLLMDialect() if host == "vllm" else SGLangDialect()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        import aiohttp

        self._session = aiohttp.ClientSession(
            # A server closes connections that idle; one that is reused at that moment breaks.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=REQUEST_SECONDS),
            read_bufsize=2**22,  # a line of the stream may hold a whole answer
        )
        try:
            await self._dialect.prepare(self.get)
        except BaseException:
            await self._session.close()
            raise
        return self

    @property
    def takes_in_together(self) -> bool:
        """Whether the host takes in all prompts of a batch before it decodes the first."""
        return self._dialect.takes_in_together

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    async def batch(
        self, prompts: Sequence[Prompt], tokens: int, *, logprobs: bool = False
    ) -> tuple[list[Completion], float]:
        """Answers to all prompts in one request, and the seconds it took.

        Raises
        ------
        ClientError
            If the server refuses, or an answer does not have `tokens` tokens.
        """
        body = self._dialect.body(prompts, tokens, logprobs=logprobs, stream=False)
        data = self._encoded(body)
        began = time.perf_counter()
        async with self._post(data) as response:
            content = await response.read()
            seconds = time.perf_counter() - began
        answers = self._dialect.answers(json.loads(content))
        if [len(answer.ids) for answer in answers] != [tokens] * len(prompts):
            found = sorted({len(answer.ids) for answer in answers})
            raise ClientError(
                f"asked for {len(prompts)} answers of {tokens} tokens, got {len(answers)} of "
                f"{found}; do prompt and answer fit the model's context and the KV cache?"
            )
        return answers, seconds

    async def gap(self, prompt: Prompt, token: int) -> float:
        """How much likelier than `token` the likeliest token after a prompt is (log-probabilities).

        With no other request under way: SGLang 0.5.17 ends if it takes in such a question in one
        batch with a prompt of none.

        Raises
        ------
        ClientError
            If the server refuses.
        """
        body = self._dialect.gap_body(prompt, token)
        async with self._post(self._encoded(body)) as response:
            return self._dialect.gap(json.loads(await response.read()), token)

    async def stream(
        self, prompt: Prompt, tokens: int, *, leave_after: int | None = None
    ) -> Completion:
        """One answer, with the time of every token.

        Parameters
        ----------
        leave_after : int, optional
            Hang up when this many tokens have come: the host aborts the request.

        Raises
        ------
        ClientError
            As :meth:`batch`.
        """
        body = self._dialect.body([prompt], tokens, logprobs=False, stream=True)
        data = self._encoded(body)
        answer = Completion(sent=time.perf_counter())
        async with self._post(data) as response:
            async for line in response.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                now = time.perf_counter() - answer.sent
                new = self._dialect.piece(json.loads(line[6:]), answer)
                answer.ids.extend(new)
                answer.arrivals.extend([now] * len(new))
                if leave_after is not None and len(answer.ids) >= leave_after:
                    response.close()
                    return answer
        if len(answer.ids) != tokens:
            raise ClientError(f"an answer ended after {len(answer.ids)} of {tokens} tokens")
        return answer

    async def get(self, path: str) -> Any:
        """A JSON document of the server; None if it has none there."""
        import aiohttp

        try:
            async with self._open().get(self._url + path) as response:
                return await response.json() if response.status == 200 else None
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
            raise ClientError(f"{path} failed: {error!r}") from error

    def _encoded(self, body: dict[str, Any]) -> bytes:
        return json.dumps({**body, **self._fields}).encode()

    @contextlib.asynccontextmanager
    async def _post(self, data: bytes) -> AsyncIterator[aiohttp.ClientResponse]:
        import aiohttp

        headers = {"Content-Type": "application/json"}
        url = self._url + self._dialect.path
        try:
            async with self._open().post(url, data=data, headers=headers) as response:
                if response.status != 200:
                    said = (await response.text())[:300]
                    raise ClientError(f"{self._dialect.path} answered {response.status}: {said}")
                yield response
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError, KeyError) as error:
            raise ClientError(f"{self._dialect.path} failed: {error!r}") from error

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the client is used outside of its context")
        return self._session
