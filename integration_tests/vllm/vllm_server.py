"""Real vLLM servers on the CPU: started once for many tests, watched, always ended."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from deft_backend.hosts.launch import free_port, server_command
from deft_backend.hosts.server_process import ServerProcess
from integration_tests.common.server import (
    MODEL,
    START_SECONDS,
    Server,
    cores_of_two_ranks,
    state_settings,
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
        {"VLLM_LOG_STATS_INTERVAL": "1"},
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
    "two-ranks": Group(
        ("--block-size", "128", "--max-model-len", "1024", "--tensor-parallel-size", "2"),
        {"DEFT_MIN_BATCH": "1", "VLLM_CPU_OMP_THREADS_BIND": cores_of_two_ranks()},
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

    @property
    def choices(self) -> int:
        return self.beams or self.n

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


@contextmanager
def running(backend: str | None, group: Group, folder: Path, adapter: Path) -> Iterator[Server]:
    """A server for the length of a block. Every decode step is checked against the host's."""
    settings = state_settings(backend, folder)
    if backend == "deft":
        settings |= group.settings
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
