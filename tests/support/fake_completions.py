"""A made-up server of OpenAI's completions: it answers by rule, and fails when it is told to."""

import asyncio
import json
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from deft_backend.tools.harness.client import ServerClient
from deft_backend.tools.harness.workload import replay

NO_FAULT, DONE = "none", "[DONE]"


@dataclass
class Fake:
    """How the server behaves, and what it was asked."""

    token_seconds: float = 0.0  # between two tokens
    context: int | None = None  # of prompt and answer, one token a character
    shows_context: bool = True  # under ``/v1/models``
    salt: str = ""  # changes the answers
    margin: float = 5.0
    """Between the two likeliest tokens at the end of any answer; before, they are far apart."""
    piece_tokens: int = 1  # of a piece of the stream
    faults: dict[str, Any] = field(default_factory=dict)
    """By a part of the prompt: a status, a piece of the stream, ``drop``, ``error``, ``empty``,
    ``cut`` (no end mark) or ``end`` (an early end)."""
    dies_after: int | None = None  # requests until the server stops answering
    metrics: str = ""  # in which REQUESTS stands for how many it got
    bodies: list[dict[str, Any]] = field(default_factory=list)
    sent: list[list[float]] = field(default_factory=list)  # when the pieces of each stream left
    url: str = ""

    @property
    def dead(self):
        return self.dies_after is not None and len(self.bodies) > self.dies_after

    def app(self):
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/metrics", self.page)
        app.router.add_post("/v1/completions", self.completions)
        return app

    async def models(self, request):
        if self.dead:
            return self._drop(request)
        entry = {"id": "made-up"}
        if self.context is not None and self.shows_context:
            entry["max_model_len"] = self.context
        return web.json_response({"data": [entry]})

    async def page(self, request):
        return web.Response(text=self.metrics.replace("REQUESTS", str(len(self.bodies))))

    async def completions(self, request):
        body = await request.json()
        self.bodies.append(body)
        prompt, tokens = "".join(map(letter, body["prompt"])), body["max_tokens"]
        if self.dead:
            return self._drop(request)
        if self.context is not None and len(prompt) + tokens > self.context:
            said = f"maximum context length is {self.context} tokens"
            return web.json_response({"error": said}, status=400)
        found = (what for part, what in self.faults.items() if part in prompt)
        fault = next(found, NO_FAULT)
        if isinstance(fault, int):
            return web.json_response({"error": "made-up fault"}, status=fault)
        answer = self._answer(prompt, tokens)
        usage = {"prompt_tokens": len(prompt), "completion_tokens": tokens}
        if not body.get("stream"):
            margins = [9.0] * (tokens - 1) + [self.margin]
            top = {"top_logprobs": [{"a": -0.1, "b": -0.1 - margin} for margin in margins]}
            choice = {"text": "a", "logprobs": top, "prompt_token_ids": list(map(ord, prompt))}
            return web.json_response({"choices": [choice], "usage": usage})
        pieces = [answer[at : at + self.piece_tokens] for at in range(0, tokens, self.piece_tokens)]
        choices = [self._choice(text, "logprobs" in body) for text in pieces]
        return await self._stream(request, choices, usage, fault)

    def _choice(self, text, logprobs):
        choice = {"index": 0, "text": text, "token_ids": list(map(ord, text))}
        if logprobs:
            # The second choice is far away where the salt does not change the answer.
            gaps = [self.margin if letter in self.salt else 9.0 for letter in text]
            choice["logprobs"] = {
                "tokens": list(text),
                "token_logprobs": [-0.1] * len(text),
                "top_logprobs": [{"a": -0.1, "b": -0.1 - gap} for gap in gaps],
            }
        return choice

    async def _stream(self, request, choices, usage, fault=NO_FAULT):
        response = web.StreamResponse()
        await response.prepare(request)
        times: list[float] = []
        self.sent.append(times)
        for at, choice in enumerate(choices):
            if fault == "empty":
                break
            if at == 1 and fault == "cut":
                return response
            if at == 1 and fault == "end":
                break
            if at == 1 and fault not in ("drop", "error", NO_FAULT):
                await self._piece(response, fault)
            if at == 1 and fault == "drop":
                return self._drop(request)
            if at == 1 and fault == "error":
                await self._piece(response, {"error": "made-up fault in the stream"})
                break
            await asyncio.sleep(self.token_seconds)
            await self._piece(response, {"choices": [choice]})
            times.append(time.perf_counter())
        await self._piece(response, {"choices": [], "usage": usage})
        await self._piece(response, DONE)
        return response

    async def _piece(self, response, content):
        text = content if content == DONE else json.dumps(content)
        with suppress(ConnectionError):  # the client may leave
            await response.write(f"data: {text}\n\n".encode())

    def _answer(self, prompt, tokens):
        seed = sum(map(ord, prompt[-40:]))
        text = "".join(chr(97 + (seed * (at + 3)) % 26) for at in range(tokens))
        return text if not self.salt else text[: tokens // 2] + self.salt * (tokens - tokens // 2)

    def _drop(self, request):
        request.transport.abort()
        return web.Response()


def letter(token):
    """Of a prompt of text or of ids."""
    return token if isinstance(token, str) else chr(token)


@contextmanager
def serving(fake):
    """The server on a port of its own, in a thread, for a `with` block."""
    loop = asyncio.new_event_loop()
    started = threading.Event()

    async def start():
        runner = web.AppRunner(fake.app())
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        fake.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return runner

    def run():
        runner = loop.run_until_complete(start())
        started.set()
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(20)
    try:
        yield fake
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(20)


def replayed(fake, workload, context=None):
    """What became of a workload's requests to the server."""

    async def send():
        async with ServerClient(fake.url) as client:
            client.model = "made-up"
            return await replay(workload, client, context)

    return asyncio.run(send())
