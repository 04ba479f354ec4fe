"""Real vLLM servers on the CPU: started once for many tests, and always ended."""

import json
from dataclasses import dataclass, field, replace

from deft_backend.hosts.vllm.versions import backend_name
from deft_backend.tools.servers.command import free_port, server_command
from integration_tests.common.answers import POLICY_GROUPS
from integration_tests.common.plugins import CPU_BACKEND
from integration_tests.common.server import (
    DRAFT,
    MODEL,
    cores_of_two_ranks,
    started,
    state_settings,
)


@dataclass(frozen=True)
class Group:
    """Flags and settings of a server that serves several tests."""

    flags: tuple[str, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)
    lora: bool = False


_SPECULATING = (
    *["--block-size", "32", "--max-model-len", "2048", "--max-num-batched-tokens", "512"],
    "--speculative-config",
)
_CHUNKS = ("--block-size", "16", "--max-model-len", "512", "--max-num-batched-tokens", "64")
_LOOKUP = '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}'
_SHORT_LINES = {"DEFT_MIN_BATCH": "1", "VLLM_LOG_STATS_INTERVAL": "1"}
_LAYOUT = "BLHNC" if backend_name() == "DEFT" else "HND"
_DRAFT = json.dumps({"model": str(DRAFT), "num_speculative_tokens": 4})

GROUPS = {
    # Prefix caching is on, which is vLLM's default.
    "default": Group(
        ("--block-size", "32", "--max-model-len", "2048", "--max-num-batched-tokens", "512"),
        {"VLLM_LOG_STATS_INTERVAL": "1"},
        lora=True,
    ),
    # Prefill in chunks, no prefix cache, and fewer pages than the requests need; another memory
    # order of the cache: blocks before layers, where the version has it.
    "pressed": Group(
        (
            *["--block-size", "32", "--max-model-len", "512", "--no-enable-prefix-caching"],
            *["--max-num-batched-tokens", "64", "--num-gpu-blocks-override", "20"],
        ),
        {"VLLM_KV_CACHE_LAYOUT": _LAYOUT, "DEFT_MIN_BATCH": "1"},
    ),
    # Prompts in chunks behind cached prefixes, so that most steps with prefills also decode. The
    # first cache has few blocks.
    "chunks-of-16": Group(
        (*_CHUNKS, "--long-prefill-token-threshold", "16", "--num-gpu-blocks-override", "40"),
        _SHORT_LINES,
    ),
    "chunks-of-64": Group(_CHUNKS, _SHORT_LINES),
    "chunks-lookup": Group((*_CHUNKS, "--speculative-config", _LOOKUP), _SHORT_LINES),
    # Chunks end where the batch leaves room, so some prompts end by a chunk of one token.
    "invariant": Group(
        (*_CHUNKS[:-1], "33", "--long-prefill-token-threshold", "16"),
        {"VLLM_BATCH_INVARIANT": "1"},
    ),
    "lookup": Group((*_SPECULATING, _LOOKUP), _SHORT_LINES),
    "draft": Group((*_SPECULATING, _DRAFT), _SHORT_LINES),
    # Fewer blocks than the documents of a test need, in the precision of the plain model. The host
    # prefills in pieces, and reports each eviction.
    "rollouts": Group(
        (
            *["--block-size", "32", "--max-model-len", "1024", "--max-num-batched-tokens"],
            *["128", "--num-gpu-blocks-override", "40", "--dtype", "float32"],
            *["--kv-cache-metrics", "--kv-cache-metrics-sample", "1"],
        ),
        {"DEFT_MIN_BATCH": "1"},
    ),
    **{
        group: Group(
            ("--block-size", "32", "--max-model-len", "1024"),
            {"DEFT_MIN_BATCH": "1", "DEFT_POLICY": group.removeprefix("policy-")},
        )
        for group in POLICY_GROUPS
    },
    "two-ranks": Group(
        ("--block-size", "128", "--max-model-len", "1024", "--tensor-parallel-size", "2"),
        {"DEFT_MIN_BATCH": "1", "VLLM_CPU_OMP_THREADS_BIND": cores_of_two_ranks()},
    ),
}


@dataclass(frozen=True)
class Ask:
    """One completion: greedy, or several answers sampled with a seed."""

    prompt: str
    tokens: int = 8
    n: int = 1
    model: str = "tiny"
    logprobs: int = 1
    pattern: str | None = None
    """Pattern that the answer must match, by guided decoding."""
    beams: int = 0
    """Number of beams of a beam search."""
    also: tuple[str, ...] = ()
    """Further prompts of the same request; each gets its own choice."""

    @property
    def choices(self):
        return (self.beams or self.n) * (1 + len(self.also))

    def body(self):
        """The request in the form of the `openai` client."""
        extra = {}
        if self.pattern is not None:
            extra["structured_outputs"] = {"regex": self.pattern}
        else:
            extra["ignore_eos"] = True
        body = {
            "model": self.model,
            "prompt": [self.prompt, *self.also],
            "max_tokens": self.tokens,
            "n": self.n,
            "temperature": 1.6 if self.n > 1 else 0.0,
            "seed": 7,
        }
        if self.beams:
            extra["use_beam_search"] = True
            body["n"] = self.beams
            body["temperature"] = 0.0
        else:
            body["logprobs"] = self.logprobs
        return {**body, "extra_body": extra}


def together(asks):
    """Several greedy completions in one request, so that they decode together. On few cores,
    separate requests may arrive so late that each decodes alone.
    """
    return replace(asks[0], also=tuple(ask.prompt for ask in asks[1:]))


def running(backend, group, folder, adapter):
    """A server for a `with` block. It checks every decode step against the host's kernel."""
    settings = {**state_settings(backend, folder, CPU_BACKEND), "VLLM_SERVER_DEV_MODE": "1"}
    if backend == "deft":
        settings |= group.settings
    flags = ["--max-num-seqs", "32", "--served-model-name", "tiny", *group.flags]
    if group.lora:
        flags += ["--enable-lora", "--max-loras", "1", "--max-lora-rank", "8"]
        flags += ["--lora-modules", f"adapted={adapter}"]
    command = server_command(
        str(MODEL),
        free_port(),
        host="vllm",
        backend=backend,
        host_arguments=flags,
        environment=settings,
        gpu=False,
    )
    return started(command, folder)
