"""A server with both hosts' endpoints, and a language model that can be computed by hand.

Run as a script it is a host server: ``bench_e2e_fakes.py PORT HOST MODE``.
"""

import asyncio
import json
import os
import sys
import time
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any

from aiohttp import web

# As a script, it sees only its own folder, because nothing installs the benchmarks.
sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.e2e.backends import HOSTS, Launch
from benchmarks.e2e.served_model import Model
from deft_backend.tools.harness.answers import Answer
from deft_backend.tools.servers.command import ServerCommand, free_port

VOCABULARY = 97
SLEEP = {
    "sglang": ("/release_memory_occupation", "/resume_memory_occupation"),
    "vllm": ("/sleep", "/wake_up"),
}
GAP = 0.125
"""Log-probability of the first choice minus that of the second."""

MODEL = Model("/nowhere", "fake", VOCABULARY, 4096)


def first_choice(context):
    return (sum(context) * 31 + len(context) * 7) % VOCABULARY


def second_choice(context):
    return (first_choice(context) + 1) % VOCABULARY


def third_choice(context):
    """Tokens without a reported log-probability."""
    return (first_choice(context) + 50) % VOCABULARY


def gap_to(context, token):
    """Log-probability of the first choice minus that of `token`."""
    return {first_choice(context): 0.0, second_choice(context): GAP}.get(token, 8.5)


def decode(prompt, tokens, mode="right"):
    """The answer; at every fifth position it follows `mode`: ``tie`` or ``wrong``."""
    context, answer = list(prompt), Answer()
    for _ in range(tokens):
        choose = first_choice
        if len(context) % 5 == 0:
            choose = {"tie": second_choice, "wrong": third_choice}.get(mode, first_choice)
        found = choose(context)
        top = {choice: -0.5 - gap_to(context, choice) for choice in
               (first_choice(context), second_choice(context))}  # fmt: skip
        answer.ids.append(found)
        answer.top.append(top)
        answer.logprobs.append(-0.5 - gap_to(context, found))
        context.append(found)
    return answer


def beam(prompt, number, tokens, mode="right"):
    """Beam `number`: the answer to a prompt that no other beam has."""
    return decode([*prompt, number], tokens, mode)


def of_prompt(prompt, at):
    """vLLM's report on a prompt's token: the likeliest tokens there, and the token itself."""
    before = prompt[:at]
    return {
        str(token): {"logprob": -0.5 - gap_to(before, token)}
        for token in (first_choice(before), prompt[at])
    }


@dataclass
class FakeHost:
    """The server; `hung_up` counts streams that the client left."""

    host: str = "sglang"
    mode: str = "right"
    incremental: bool = False
    requests: int = 0
    hung_up: int = 0
    prompts: list[list[int]] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    slept: list[str] = field(default_factory=list)

    def app(self):
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/health", self.health)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/v1/completions", self.complete)
        for path in SLEEP[self.host]:
            app.router.add_post(path, self.sleep)
        return app

    async def health(self, request):
        return web.Response(text="ok")

    async def sleep(self, request):
        self.slept.append(request.path_qs)
        return web.Response()

    async def models(self, request):
        return web.json_response({"data": [{"id": "served"}]})

    def _enough(self):
        self.requests += 1
        if self.mode == "dies" and self.requests > 2:
            os._exit(3)
        if self.mode == "refuses":
            raise web.HTTPBadRequest(text="no room")

    async def generate(self, request):
        self._enough()
        body = json.loads(await request.text())
        self.bodies.append(body)
        tokens = body["sampling_params"]["max_new_tokens"] - (self.mode == "short")
        if not body["stream"] and isinstance(body["input_ids"][0], int):
            return web.json_response(self._whole(body["input_ids"], body, tokens))
        if not body["stream"]:
            self.prompts += body["input_ids"]
            answers = [
                self._sglang(decode(prompt, tokens, self.mode), body.get("return_logprob", False))
                for prompt in body["input_ids"]
            ]
            for prompt, answer in zip(body["input_ids"], answers, strict=True):
                answer["meta_info"]["output_token_ids_logprobs"] = [
                    [[-0.5 - gap_to(prompt, token), token, None]
                     for token in body.get("token_ids_logprob", [])]
                ]  # fmt: skip
            return web.json_response(answers)
        self.prompts.append(body["input_ids"])
        ids = decode(body["input_ids"], tokens, self.mode).ids
        pieces = [
            {
                "output_ids": ids[i : i + 1] if self.incremental else ids[: i + 1],
                "meta_info": {"completion_tokens": i + 1, "cached_tokens": 3},
            }
            for i in range(tokens)
        ]
        return await self._stream(request, pieces)

    def _whole(self, prompt, body, tokens):
        self.prompts.append(prompt)
        width = body["sampling_params"].get("beam_width")
        if width is None:
            return self._sglang(decode(prompt, tokens, self.mode), False)
        assert body["sampling_params"]["n"] == width
        beams = [self._sglang(beam(prompt, i, tokens, self.mode), False) for i in range(width)]
        best = {**beams[0], "meta_info": {**beams[0]["meta_info"], "beam_results": beams}}
        return best

    def _sglang(self, answer, logprobs):
        meta = {"completion_tokens": len(answer.ids), "cached_tokens": 3}
        if logprobs:
            meta["output_token_logprobs"] = [
                [value, token, None]
                for value, token in zip(answer.logprobs, answer.ids, strict=True)
            ]
            meta["output_top_logprobs"] = [
                [[value, token, None] for token, value in top.items()] for top in answer.top
            ]
        return {"output_ids": answer.ids, "meta_info": meta}

    async def complete(self, request):
        self._enough()
        body = json.loads(await request.text())
        self.bodies.append(body)
        assert body["model"] == "served"
        tokens = body["max_tokens"] - (self.mode == "short")
        answers = [decode(prompt, tokens, self.mode) for prompt in body["prompt"]]
        if body.get("use_beam_search"):
            (prompt,) = body["prompt"]
            answers = [beam(prompt, i, tokens, self.mode) for i in range(body["n"])]
        self.prompts += body["prompt"]
        if body["stream"]:
            pieces = [
                {"choices": [{"index": 0, "text": "", "token_ids": [id]}]} for id in answers[0].ids
            ]
            return await self._stream(request, [*pieces, {"choices": [], "usage": {}}])
        choices = [
            {
                "index": index, "token_ids": answer.ids,
                "logprobs": {
                    "token_logprobs": answer.logprobs,
                    "top_logprobs": [
                        {f"token_id:{token}": value for token, value in top.items()}
                        for top in answer.top
                    ],
                } if body.get("logprobs") else None,
                "prompt_logprobs": [
                    None, *(of_prompt(prompt, i) for i in range(1, len(prompt)))
                ] if body.get("prompt_logprobs") else None,
            }
            for index, (prompt, answer) in enumerate(zip(cycle(body["prompt"]), answers))
        ]  # fmt: skip
        return web.json_response({"choices": choices[::-1]})  # in any order

    async def _stream(self, request, pieces):
        response = web.StreamResponse()
        await response.prepare(request)
        try:
            for piece in pieces:
                await response.write(f"data: {json.dumps(piece)}\n\n".encode())
                await asyncio.sleep(0.001)
            await response.write(b"data: [DONE]\n\n")
        except ConnectionError:
            self.hung_up += 1
        return response


class FakeLaunch(Launch):
    """Starts the script below instead of a host; the backend's name selects its behaviour."""

    def command(self, backend):
        port = free_port()
        arguments = (sys.executable, __file__, str(port), self.host.name, backend)
        return ServerCommand(arguments, {}, port, on_gpu=False)


def fake_launch(host="sglang"):
    """`right` is our backend; other backends have the name of their fault."""
    named = replace(HOSTS[host], backends=("right", "tie"), on_cpu=("right", "tie"))
    return FakeLaunch(named, MODEL)


class FakeClient:
    """A client without a server; a formula gives its times."""

    def __init__(self, seconds_a_token=0.01, seconds_before=0.5):
        self.seconds_a_token = seconds_a_token
        self.seconds_before = seconds_before
        self.asked = []
        self.mode = "right"
        self.under_way = 0
        self.takes_in_together = True

    async def batch(self, prompts, tokens, *, logprobs=False):
        seconds = self.seconds_before + self.seconds_a_token * (tokens - 1)
        self.under_way += 1
        await asyncio.sleep(0)
        self.under_way -= 1
        return [decode(prompt, tokens, self.mode) for prompt in prompts], seconds

    async def gap(self, prompt, token):
        assert not self.under_way, "a gap is asked for beside other requests"
        return gap_to(prompt, token)

    async def stream(self, prompt, tokens, *, leave_after=None):
        self.asked.append((tuple(prompt), tokens))
        await asyncio.sleep(0)
        answer = decode(prompt, tokens, self.mode)
        answer.arrivals = [
            self.seconds_before + i * self.seconds_a_token for i in range(len(answer.ids))
        ]
        answer.cached = 0
        return answer


if __name__ == "__main__":
    _port, _host, _mode = sys.argv[1:]
    if _mode == "hangs":
        time.sleep(600)
    if _mode == "crashes":
        sys.exit("the server does not start")
    web.run_app(FakeHost(_host, _mode).app(), host="127.0.0.1", port=int(_port), print=None)
