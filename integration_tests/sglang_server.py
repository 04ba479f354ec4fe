"""Real SGLang servers on the CPU engine: started once for many tests, and always ended."""

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from deft_backend.tools.servers.command import free_port, server_command
from integration_tests.common.answers import POLICY_GROUPS
from integration_tests.common.server import (
    DRAFT,
    EAGER,
    MODEL,
    cores_of_two_ranks,
    started,
    state_settings,
)
from integration_tests.cpu_speculation import REGISTER


@dataclass(frozen=True)
class Group:
    """Flags and settings of a server that serves several tests."""

    flags: tuple[str, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)
    cpu_speculation: bool = False
    """Let it speculate on the CPU, with stand-ins for what the host's wheel lacks."""
    model: Path = MODEL
    cli: bool = False
    """Start it with ``sglang serve``, not ``python -m sglang.launch_server``."""


# If the host finds NCCL, its group of two ranks needs a GPU.
_TWO_PROCESSES = {
    "SGLANG_CPU_OMP_THREADS_BIND": cores_of_two_ranks(),
    "SGLANG_NCCL_SO_PATH": "/nowhere/libnccl.so",
}

_SMALL_CACHE = (
    *["--max-total-tokens", "1280", "--page-size", "16", "--chunked-prefill-size", "128"],
    *["--enable-cache-report", "--enable-metrics"],
)


def _speculating(*flags, draft=True):
    """A server that drafts 3 tokens a step from each of `topk` branches, or n-grams."""
    model = ("--speculative-draft-model-path", str(DRAFT), "--speculative-num-steps", "3")
    return Group((*flags, *(model if draft else ())), EAGER, cpu_speculation=True)


_CHAIN = (
    *["--speculative-algorithm", "STANDALONE", "--speculative-eagle-topk", "1"],
    *["--speculative-num-draft-tokens", "4"],
)
_TREE = (
    *["--speculative-algorithm", "STANDALONE", "--speculative-eagle-topk", "2"],
    *["--speculative-num-draft-tokens", "6"],
)
_LOOKUP = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "6")

GROUPS = {
    "default": Group(),
    "no-overlap": Group(
        ("--disable-overlap-schedule", "--enable-metrics", "--decode-log-interval", "4"), cli=True
    ),
    "chunked-pages": Group(("--chunked-prefill-size", "128", "--page-size", "16"), EAGER),
    "no-radix": Group(("--disable-radix-cache",), EAGER),
    # Fewer pages than the documents of a test need, and the core of the unified tree in Python.
    "small-cache": Group(
        _SMALL_CACHE, {**EAGER, "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": "python"}
    ),
    # The host's own switch for its tests: every few steps it retracts decoding requests.
    "retracting": Group(
        settings={**EAGER, "SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "6"}
    ),
    "mixed": Group(("--enable-mixed-chunk", "--chunked-prefill-size", "32"), EAGER),
    "mixed-ranks": Group(
        ("--enable-mixed-chunk", "--chunked-prefill-size", "64", "--tensor-parallel-size", "2"),
        {**EAGER, **_TWO_PROCESSES},
    ),
    "two-ranks": Group(("--tensor-parallel-size", "2"), {**EAGER, **_TWO_PROCESSES}),
    "stages": Group(("--pipeline-parallel-size", "2"), {**EAGER, **_TWO_PROCESSES}),
    "engines": Group(("--data-parallel-size", "2"), {**EAGER, **_TWO_PROCESSES}),
    **{
        group: Group(settings={**EAGER, "DEFT_POLICY": group.removeprefix("policy-")})
        for group in POLICY_GROUPS
    },
    "chain": _speculating(*_CHAIN),
    "tree": _speculating(*_TREE),
    "lookup": _speculating(*_LOOKUP, draft=False),
    "chain-pages": _speculating(*_CHAIN, "--page-size", "16", "--chunked-prefill-size", "128"),
}


@dataclass(frozen=True)
class Ask:
    """One greedy completion of exactly the requested length."""

    prompt: str
    tokens: int = 8
    n: int = 1
    logprobs: bool = True  # the host mixes no prefill into the steps of requests that ask for them

    @property
    def choices(self):
        return self.n

    def body(self):
        """The request in the form of the `openai` client."""
        body = {
            "model": "default",
            "prompt": self.prompt,
            "max_tokens": self.tokens,
            "n": self.n,
            "temperature": 0,
            "extra_body": {"ignore_eos": True},
        }
        return {**body, "logprobs": 1} if self.logprobs else body


def running(backend, group, folder):
    """A server for a `with` block. It checks every plan against the page tables."""
    folder.mkdir(parents=True, exist_ok=True)
    plugins = [REGISTER] if group.cpu_speculation else []
    settings = {**state_settings(backend, folder, *plugins), **group.settings}
    # Servers that start side by side would load what the other one has half written.
    settings |= {"TORCHINDUCTOR_CACHE_DIR": str(folder.parent / "inductor")}
    # Without `--sleep-on-idle` the host's scheduler polls: the baseline would take a core.
    flags = ["--max-running-requests", "32", "--dtype", "float32", "--sleep-on-idle", *group.flags]
    command = server_command(
        str(group.model),
        free_port(),
        backend=backend,
        host_arguments=flags,
        environment=settings,
        gpu=False,
    )
    if group.cli:
        script = str(Path(sys.executable).parent / "sglang")
        command = replace(command, arguments=(script, "serve", *command.arguments[3:]))
    return started(command, folder)


def in_shared_memory(folder):
    """A checkpoint as the body of ``update_weights_from_tensor``."""
    import torch.multiprocessing as sharing
    from safetensors.torch import load_file
    from sglang.srt.utils import MultiprocessingSerializer

    # Another process opens the memory by its name; file descriptors need a common parent.
    sharing.set_sharing_strategy("file_system")
    weights = [
        each
        for file in sorted(folder.glob("*.safetensors"))
        for each in load_file(str(file)).items()
    ]
    return {
        "serialized_named_tensors": [MultiprocessingSerializer.serialize(weights, output_str=True)]
    }
