"""Real vLLM servers on the CPU: started once for many tests, watched, always ended."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import torch
from safetensors.torch import save_file

from deft_backend.hosts.launch import free_port, server_command
from deft_backend.hosts.server_process import ServerProcess

ROOT = Path(__file__).parents[2]
MODEL = Path(os.environ.get("INTEGRATION_MODEL", ROOT / "models" / "tiny-llama"))
"""The model served; another one may be named in the environment."""

START_SECONDS = 400
REQUEST_SECONDS = 400

# What the host logs while it works as it should is no sign of trouble; these are.
TROUBLE = re.compile(
    r"Traceback|\bERROR\b|deft: .*(fail|not agree|could not|not supported|not registered)"
)


@dataclass(frozen=True)
class Group:
    """Flags and settings under which one server serves several tests."""

    flags: tuple[str, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)
    lora: bool = False


GROUPS = {
    # Prefix caching is on, as it is unless one turns it off.
    "default": Group(
        ("--block-size", "16", "--max-model-len", "2048", "--max-num-batched-tokens", "512"),
        lora=True,
    ),
    # Prompts in pieces, no cache of prefixes, and fewer blocks than the requests will want; the
    # other memory order of the cache.
    "pressed": Group(
        (
            "--block-size", "32", "--max-model-len", "512", "--no-enable-prefix-caching",
            "--max-num-batched-tokens", "64", "--num-gpu-blocks-override", "20",
        ),
        {"VLLM_KV_CACHE_LAYOUT": "HND", "DEFT_MIN_BATCH": "1"},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Ask:
    """One completion: greedy, unless there are several answers, which are drawn by a seed."""

    prompt: str
    tokens: int = 8
    n: int = 1
    model: str = "tiny"
    logprobs: int = 1
    pattern: str | None = None
    """Of what the answer must match, by guided decoding."""
    beams: int = 0
    """Beam search over so many."""

    def body(self) -> dict[str, Any]:
        """The request, as the `openai` client takes it."""
        extra: dict[str, Any] = {}
        if self.pattern is not None:
            extra["structured_outputs"] = {"regex": self.pattern}
        else:
            extra["ignore_eos"] = True
        body: dict[str, Any] = {
            "model": self.model, "prompt": self.prompt, "max_tokens": self.tokens, "n": self.n,
            "temperature": 0.8 if self.n > 1 else 0.0, "seed": 7,
        }  # fmt: skip
        if self.beams:
            extra["use_beam_search"] = True
            body["n"] = self.beams
            body["temperature"] = 0.0
        else:
            body["logprobs"] = self.logprobs
        return {**body, "extra_body": extra}


@dataclass(frozen=True)
class Answer:
    """What came back for one choice: text and, per token, the likeliest with their logarithms."""

    text: str
    finish: str | None
    token_texts: tuple[str, ...]
    logprobs: tuple[float, ...]
    likeliest: tuple[dict[str, float], ...]


class Server:
    """A running server, as a client sees it."""

    def __init__(self, process: ServerProcess, state_dir: Path) -> None:
        self.process = process
        self._state_dir = state_dir

    @property
    def log(self) -> str:
        return self.process.log.read_text(errors="replace")

    def trouble(self) -> list[str]:
        """Lines of the log that a healthy server does not write."""
        return [line for line in self.log.splitlines() if TROUBLE.search(line)]

    def state(self) -> dict[str, Any]:
        """The server's state file, once it has settled."""
        time.sleep(0.8)  # three rounds of the writer
        port = self.process.command.port
        return json.loads((self._state_dir / f"{port}-tp0.json").read_text())

    def metric(self, name: str) -> float:
        """Sum of one of the host's own counters."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{self.process.url}/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
        values = [line.rsplit(" ", 1)[1] for line in lines if line.startswith(f"{name}{{")]
        assert values, f"the host has no counter {name}"
        return sum(map(float, values))

    def client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.process.url}/v1", api_key="none", timeout=REQUEST_SECONDS,
            max_retries=0,
        )  # fmt: skip

    def complete(self, asks: Sequence[Ask]) -> list[list[Answer]]:
        """Ask everything at once; answers in order, one list of choices each."""
        return asyncio.run(self._complete(asks))

    async def _complete(self, asks: Sequence[Ask]) -> list[list[Answer]]:
        async with self.client() as client:
            return list(await asyncio.gather(*(complete(client, ask) for ask in asks)))


async def complete(client: openai.AsyncOpenAI, ask: Ask) -> list[Answer]:
    """One completion."""
    response = await client.completions.create(**ask.body())
    found = []
    for choice in sorted(response.choices, key=lambda choice: choice.index):
        logs = choice.logprobs
        found.append(
            Answer(
                choice.text,
                choice.finish_reason,
                tuple(logs.tokens) if logs else (),
                tuple(logs.token_logprobs) if logs else (),
                tuple(logs.top_logprobs) if logs else (),
            )
        )
    return found


@contextmanager
def running(backend: str | None, group: Group, folder: Path, adapter: Path) -> Iterator[Server]:
    """A server for the length of a block. Every decode step is checked against the host's."""
    settings = {
        "DEFT_STATE_DIR": str(folder / "state"),
        "DEFT_VERIFY": "1",
        "DEFT_LOG": "debug",
        "DEFT_OBSERVE": "0" if backend == "deft" else "1",
        **(group.settings if backend == "deft" else {}),
    }
    flags = ["--max-num-seqs", "32", "--served-model-name", "tiny", *group.flags]
    if group.lora:
        flags += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", "8"]
        flags += ["--lora-modules", f"adapted={adapter}"]
    command = server_command(
        str(MODEL), free_port(), host="vllm", backend=backend, host_arguments=flags,
        environment=settings, gpu=False,
    )  # fmt: skip
    with ServerProcess(command, folder / "server.log", timeout=START_SECONDS) as process:
        yield Server(process, folder / "state")


def write_adapter(folder: Path) -> None:
    """A LoRA adapter of rank 8 for every layer's queries, keys and values, of random weights."""
    config = json.loads((MODEL / "config.json").read_text())
    width, dim = config["hidden_size"], config["head_dim"]
    outputs = {
        "q_proj": config["num_attention_heads"] * dim,
        "k_proj": config["num_key_value_heads"] * dim,
        "v_proj": config["num_key_value_heads"] * dim,
    }
    generator = torch.Generator().manual_seed(5)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, rows in outputs.items():
            base = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{base}.lora_A.weight"] = torch.randn((8, width), generator=generator) * 0.2
            weights[f"{base}.lora_B.weight"] = torch.randn((rows, 8), generator=generator) * 0.2
    save_file(weights, str(folder / "adapter_model.safetensors"))
    settings = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 8, "lora_alpha": 8,
        "target_modules": list(outputs), "lora_dropout": 0.0, "bias": "none",
        "base_model_name_or_path": "tiny",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(settings))
