"""A server with the hosts' completions, and a language model that can be computed by hand.

Run as a script it is a host server: ``FAKE_MODE=MODE bench_e2e_fakes.py … --port PORT …``.
"""

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from aiohttp import web

# As a script, it sees only its own folder, because nothing installs the benchmarks.
sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.e2e.launch import HOSTS, Launch
from benchmarks.e2e.served_model import Model
from deft_backend.tools.harness.answers import Answer
from deft_backend.tools.servers.command import ServerCommand, free_port, value_of
from fake_completions import Fake

VOCABULARY = 97
GAP = 0.125
"""Log-probability of the first choice minus that of the second."""

MODEL = Model("/nowhere", "fake", VOCABULARY, 4096)


def decode(prompt, tokens, mode="right"):
    """The answer. At every fifth position it is the second choice (`mode` ``tie``), or a token
    without a reported log-probability (``wrong``).
    """
    context, answer = list(prompt), Answer()
    for _ in range(tokens):
        first = (sum(context) * 31 + len(context) * 7) % VOCABULARY
        other = {"tie": 1, "wrong": 50}.get(mode, 0) if len(context) % 5 == 0 else 0
        found = (first + other) % VOCABULARY
        top = {first: -0.5, (first + 1) % VOCABULARY: -0.5 - GAP}
        answer.ids.append(found)
        answer.top.append({f"w{token}": value for token, value in top.items()})
        answer.logprobs.append(top.get(found, -9.0))
        context.append(found)
    return answer


@dataclass
class FakeHost(Fake):
    token_seconds: float = 0.001
    mode: str = "right"

    def app(self):
        app = super().app()
        app.router.add_post("/generate", self.beams)
        return app

    async def beams(self, request):
        body = await request.json()
        self.bodies.append(body)
        sampling = body["sampling_params"]
        beams = [
            {"output_ids": decode([*body["input_ids"], at], sampling["max_new_tokens"]).ids}
            for at in range(sampling["beam_width"])
        ]
        return web.json_response({"meta_info": {"beam_results": beams}})

    async def completions(self, request):
        body = await request.json()
        self.bodies.append(body)
        if self.mode == "dies" and len(self.bodies) > 2:
            os._exit(3)
        assert body["model"] == "made-up"
        several = isinstance(body["prompt"][0], list)
        prompts = body["prompt"] if several else [body["prompt"]]
        tokens = body["max_tokens"]
        if body.get("use_beam_search"):
            prompts = [[*prompts[0], at] for at in range(body["n"])]
        answers = [decode(prompt, tokens, self.mode) for prompt in prompts]
        if body.get("stream"):
            usage = {"prompt_tokens": len(prompts[0]), "completion_tokens": tokens}
            made = ({"text": f"w{token} ", "token_ids": [token]} for token in answers[0].ids)
            return await self._stream(request, made, usage)
        choices = [
            {
                "index": index,
                "token_ids": answer.ids,
                "logprobs": {"token_logprobs": answer.logprobs, "top_logprobs": answer.top}
                if body.get("logprobs")
                else None,
            }
            for index, answer in enumerate(answers)
        ]
        return web.json_response({"choices": choices[::-1]})  # in any order


class FakeLaunch(Launch):
    """Starts the script below instead of a host; the backend's name selects its behaviour."""

    def command(self, backend):
        port = free_port()
        arguments = (sys.executable, __file__, "--port", str(port))
        environment = {**self.environment, "FAKE_MODE": backend}
        return ServerCommand(arguments, environment, port, on_gpu=False)


def fake_launch(host="sglang", **changed):
    """`right` is our backend; other backends have the name of their fault."""
    named = replace(HOSTS[host], backends=("right", "tie"), on_cpu=("right", "tie"))
    return FakeLaunch(named, MODEL, start_seconds=60.0, **changed)


if __name__ == "__main__":
    _port = value_of("--port", sys.argv)
    _mode = os.environ["FAKE_MODE"]
    if _mode == "crashes":
        sys.exit("the server does not start")
    web.run_app(FakeHost(mode=_mode).app(), host="127.0.0.1", port=int(_port), print=None)
