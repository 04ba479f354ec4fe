"""The client of a host server: token ids, in whole batches or streamed answers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.token_client.dialects import (
    ClientError,
    Dialect,
    Ids,
    SGLangDialect,
    VLLMDialect,
)
from deft_backend.tools.harness.answers import Answer

if TYPE_CHECKING:
    import aiohttp

__all__ = ["Client", "ClientError"]

DIALECTS: Mapping[str, Callable[[], Dialect]] = {"sglang": SGLangDialect, "vllm": VLLMDialect}
"""Each host's own endpoint of token ids."""


class Client:
    """A client of one server; an asynchronous context manager.

    Decoding is greedy and stops after exactly the requested tokens.

    Parameters
    ----------
    url : str
        The server, without a path.
    dialect : str
        The host's name: one of :data:`DIALECTS`.
    fields : mapping, optional
        Further fields of every request, such as SGLang's ``lora_path``.
    seconds : float
        Time limit of one request.
    """

    def __init__(
        self,
        url: str,
        dialect: str,
        fields: Mapping[str, Any] | None = None,
        *,
        seconds: float = 580.0,
    ) -> None:
        self._url = url
        self._fields = dict(fields or {})
        self._dialect = DIALECTS[dialect]()
        self._seconds = seconds
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        import aiohttp

        self._session = aiohttp.ClientSession(
            # A server closes idle connections; a request on one breaks. So each opens its own.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=self._seconds),
            read_bufsize=2**22,  # a line of the stream may hold a whole answer
        )
        try:
            await self._dialect.prepare(self.get)
        except BaseException:
            await self._session.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def takes_in_together(self) -> bool:
        """Whether the host reads all prompts of a batch before it decodes the first."""
        return self._dialect.takes_in_together

    async def batch(
        self, prompts: Sequence[Ids], tokens: int, *, logprobs: bool = False
    ) -> tuple[list[Answer], float]:
        """Answers to all prompts in one request, and the seconds it took.

        Raises
        ------
        ClientError
            If the server refuses, or an answer does not have `tokens` tokens.
        """
        data = self._encoded(self._dialect.batch_body(prompts, tokens, logprobs=logprobs))
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

    async def whole(
        self, prompt: Ids, tokens: int, *, beams: int = 1, sampled: bool = False
    ) -> list[Answer]:
        """The answer to one prompt when all of it is there, or all beams, best first.

        Parameters
        ----------
        beams : int
            Width of a beam search; 1: none.
        sampled : bool
            Sample at temperature 1, as rollouts do.

        Raises
        ------
        ClientError
            As :meth:`batch`.
        """
        body = self._dialect.whole_body(prompt, tokens, beams=beams, sampled=sampled)
        async with self._post(self._encoded(body)) as response:
            answers = self._dialect.whole(json.loads(await response.read()))
        if [len(answer.ids) for answer in answers] != [tokens] * beams:
            found = sorted({len(answer.ids) for answer in answers})
            raise ClientError(
                f"asked for {beams} answers of {tokens} tokens, got {len(answers)} of {found}; do "
                "prompt and answer fit the model's context and the KV cache?"
            )
        return answers

    async def sleep_and_wake(self) -> float:
        """Let the server free its GPU memory and take it back; returns the seconds of both.

        Raises
        ------
        ClientError
            If the server does not offer it.
        """
        began = time.perf_counter()
        for path in self._dialect.sleep:
            async with self._post(b"{}", path) as response:
                await response.read()
        return time.perf_counter() - began

    async def gap(self, prompt: Ids, token: int) -> float:
        """How much likelier than `token` the likeliest token after a prompt is (log-probabilities).

        No other request may run meanwhile: SGLang 0.5.17 ends if one batch holds such a request
        and one without log-probabilities.

        Raises
        ------
        ClientError
            If the server refuses.
        """
        async with self._post(self._encoded(self._dialect.gap_body(prompt, token))) as response:
            return self._dialect.gap(json.loads(await response.read()), token)

    async def stream(
        self,
        prompt: Ids,
        tokens: int,
        *,
        leave_after: int | None = None,
        into: Answer | None = None,
    ) -> Answer:
        """One answer to token ids, with the arrival time of each token.

        Parameters
        ----------
        leave_after : int, optional
            Close the connection after this many tokens; the host then aborts the request.
        into : Answer, optional
            Gets the tokens as they arrive. So it holds what came before a request was cut off.

        Raises
        ------
        ClientError
            As :meth:`batch`.
        """
        data = self._encoded(self._dialect.stream_body(prompt, tokens))
        answer = Answer() if into is None else into
        answer.sent = time.perf_counter()
        async with self._post(data) as response:
            async for line in response.content:
                if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                    continue
                now = time.perf_counter() - answer.sent
                self._dialect.take(json.loads(line[6:]), answer, now)
                if leave_after is not None and len(answer) >= leave_after:
                    response.close()
                    return answer
        if len(answer.arrivals) != tokens:
            raise ClientError(
                f"an answer ended after {len(answer.arrivals)} of {tokens} tokens; do prompt and "
                "answer fit the model's context and the KV cache?"
            )
        return answer

    async def get(self, path: str) -> Any:
        """A JSON document of the server, or None if that path has none."""
        import aiohttp

        try:
            async with self._open().get(self._url + path) as response:
                return await response.json() if response.status == 200 else None
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError) as error:
            raise ClientError(f"{path} failed: {error!r}") from error

    def _encoded(self, body: dict[str, Any]) -> bytes:
        return json.dumps({**body, **self._fields}).encode()

    @contextlib.asynccontextmanager
    async def _post(
        self, data: bytes, path: str | None = None
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        import aiohttp

        headers = {"Content-Type": "application/json"}
        path = path or self._dialect.path
        url = self._url + path
        try:
            async with self._open().post(url, data=data, headers=headers) as response:
                if response.status != 200:
                    said = (await response.text())[:300]
                    raise ClientError(f"{path} answered {response.status}: {said}")
                yield response
        except (aiohttp.ClientError, asyncio.TimeoutError, OSError, ValueError, KeyError) as error:
            raise ClientError(f"{path} failed: {error!r}") from error

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the client is used outside of its context")
        return self._session
