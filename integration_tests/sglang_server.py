"""Real SGLang servers on the CPU engine: started once for many tests, watched, always ended."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import openai

from deft_backend.hosts.launch import free_port, server_command
from deft_backend.hosts.server_process import ServerProcess

ROOT = Path(__file__).parent.parent
MODEL = Path(os.environ.get("INTEGRATION_MODEL", ROOT / "models" / "tiny-llama"))
"""The model served; another one may be named in the environment."""

START_SECONDS = 300
REQUEST_SECONDS = 300

# What the host logs while it works as it should is no sign of trouble; these are.
TROUBLE = re.compile(
    r"Traceback|\bERROR\b|deft: .*(fail|not agree|dropped|could not|not supported)"
)


@dataclass(frozen=True)
class Group:
    """Flags and settings under which one server serves several tests."""

    flags: tuple[str, ...] = ()
    settings: dict[str, str] = field(default_factory=dict)
    cli: bool = False
    """Start it with ``sglang serve``, not ``python -m sglang.launch_server``."""


# Small batches and prefixes must go through the kernels, too: that is what is tested.
EAGER = {"DEFT_MIN_BATCH": "1", "DEFT_MIN_SHARE": "1", "DEFT_MIN_SHARED_TOKENS": "0"}

GROUPS = {
    "default": Group(),
    "no-overlap": Group(
        ("--disable-overlap-schedule", "--enable-metrics", "--decode-log-interval", "4"), cli=True
    ),
    "chunked-pages": Group(("--chunked-prefill-size", "128", "--page-size", "16"), EAGER),
    "no-radix": Group(("--disable-radix-cache",), EAGER),
    "device-planner": Group(
        settings={
            **EAGER,
            "DEFT_PLANNER": "device",
            "DEFT_VERIFY": "0",
            "SGLANG_TEST_RETRACT": "1",
            "SGLANG_TEST_RETRACT_INTERVAL": "8",
        }
    ),
    # The host's own switch for its tests: every few steps it takes back requests that decode.
    "retracting": Group(
        settings={**EAGER, "SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "6"}
    ),
}


@dataclass(frozen=True)
class Ask:
    """One greedy completion."""

    prompt: str
    tokens: int = 8
    n: int = 1


@dataclass(frozen=True)
class Answer:
    """What came back for one choice: text and, per token, its log-probability."""

    text: str
    finish: str | None
    token_texts: tuple[str, ...]
    logprobs: tuple[float, ...]


class Server:
    """A running server, as a client sees it."""

    def __init__(self, process: ServerProcess, state_dir: Path, backend: str | None) -> None:
        self.process = process
        self.backend = backend
        self._state_dir = state_dir

    @property
    def log(self) -> str:
        return self.process.log.read_text(errors="replace")

    def trouble(self) -> list[str]:
        """Lines of the log that a healthy server does not write."""
        return [line for line in self.log.splitlines() if TROUBLE.search(line)]

    def state(self) -> dict[str, Any]:
        """The server's state file, once it has settled."""
        time.sleep(0.6)  # two rounds of the writer
        port = self.process.command.port
        return json.loads((self._state_dir / f"{port}-tp0.json").read_text())

    def metrics(self, prefix: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """The series of the server's ``/metrics`` under a prefix: (name, labels) to value."""
        from prometheus_client.parser import text_string_to_metric_families

        with self._open(urllib.request.Request(f"{self.process.url}/metrics")) as response:
            families = text_string_to_metric_families(response.read().decode())
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in families
            for sample in family.samples
            if sample.name.startswith(prefix)
        }

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

    def flush(self) -> None:
        """Empty the radix tree, so that one test's prefixes do not serve the next."""
        self._open(urllib.request.Request(f"{self.process.url}/flush_cache", method="POST"))

    @staticmethod
    def _open(request: urllib.request.Request) -> Any:
        return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            request, timeout=30
        )


async def complete(client: openai.AsyncOpenAI, ask: Ask) -> list[Answer]:
    """One completion, greedy and of exactly the length asked for."""
    response = await client.completions.create(
        model="default", prompt=ask.prompt, max_tokens=ask.tokens, n=ask.n, temperature=0,
        logprobs=1, extra_body={"ignore_eos": True},
    )  # fmt: skip
    return [
        Answer(
            choice.text,
            choice.finish_reason,
            tuple(choice.logprobs.tokens),
            tuple(choice.logprobs.token_logprobs),
        )
        for choice in response.choices
    ]


@contextmanager
def running(backend: str | None, group: Group, folder: Path) -> Iterator[Server]:
    """A server for the length of a block. Every plan is checked against the page tables."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = {
        "DEFT_STATE_DIR": str(folder / "state"),
        "DEFT_VERIFY": "1",
        "DEFT_LOG": "debug",
        "DEFT_OBSERVE": "0" if backend == "deft" else "1",
        **group.settings,
    }
    flags = ["--max-running-requests", "32", "--dtype", "float32", *group.flags]
    command = server_command(
        str(MODEL), free_port(), backend=backend, host_arguments=flags, environment=settings,
        gpu=False,
    )  # fmt: skip
    if group.cli:
        script = str(Path(sys.executable).parent / "sglang")
        command = replace(command, arguments=(script, "serve", *command.arguments[3:]))
    with ServerProcess(command, folder / "server.log", timeout=START_SECONDS) as process:
        yield Server(process, folder / "state", backend)
