"""A server under test: its faults, its answers, its log and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.faults.reference import Ids, Reference
from benchmarks.token_client.client import Client
from deft_backend.tools.harness.answers import Answer
from deft_backend.tools.servers.command import free_port, server_command
from deft_backend.tools.servers.process import ServerProcess

INSIDE = Path(__file__).parent / "inside"
ROOT = Path(__file__).parents[2]
SECONDS = 240.0
"""Longest time of a request; a longer one counts as a hang."""

EAGER = {"DEFT_MIN_BATCH": "1"}
_FLAGS = {
    "sglang": ("--max-running-requests", "32", "--max-total-tokens", "8192"),
    "vllm": ("--max-num-seqs", "32", "--block-size", "32", "--max-model-len", "1024"),
}
_DECODES = {"sglang": "scheduler", "vllm": "EngineCore"}


@dataclass
class Judged:
    """Answers compared with the reference.

    Attributes
    ----------
    right, wrong, lost : int
        Whole right answers; answers with a wrong token; requests without any token.
    cut : int
        Answers that were cut off after some tokens, all of them right.
    """

    right: int = 0
    wrong: int = 0
    lost: int = 0
    cut: int = 0
    errors: list[str] = field(default_factory=list)

    def add(self, found: Sequence[int], right: Sequence[int]) -> None:
        """Judge the tokens that came for one request."""
        if list(found) != list(right[: len(found)]):
            self.wrong += 1
        elif len(found) == len(right):
            self.right += 1
        elif found:
            self.cut += 1
        else:
            self.lost += 1

    def to_dict(self) -> dict[str, Any]:
        """The counts as the record holds them."""
        return {
            "right": self.right, "wrong": self.wrong, "lost": self.lost, "cut": self.cut,
            "errors": self.errors[:2],
        }  # fmt: skip


class TestedServer:
    """A server whose faults are armed by files."""

    __test__ = False

    def __init__(
        self, process: ServerProcess, host: str, faults: Path, reference: Reference
    ) -> None:
        self.process = process
        self.host = host
        self.arriving: list[Answer] = []
        self._faults = faults
        self._reference = reference
        self._told: set[str] = set()

    def arm(self, name: str) -> None:
        """Let a fault happen from now on."""
        (self._faults / name).touch()

    def disarm(self, name: str) -> int:
        """End a fault; returns how often it happened."""
        (self._faults / name).unlink(missing_ok=True)
        record = self._faults / f"{name}.done"
        count = len(record.read_text().split()) if record.exists() else 0
        record.unlink(missing_ok=True)
        return count

    def new_log_lines(self, pattern: str) -> list[str]:
        """Lines of the server's log that match, without those of an earlier call."""
        text = self.process.log.read_text(errors="replace")
        found = [line for line in text.splitlines() if re.search(pattern, line)]
        new = [line for line in dict.fromkeys(found) if line not in self._told]
        self._told.update(new)
        return new

    async def judged(
        self,
        prompts: Sequence[Ids],
        tokens: int,
        during: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> Judged:
        """Send all prompts at once and judge the answers; `during` runs while they decode."""
        expected = self._reference.answers(prompts, tokens)
        found = Judged()

        async def one(client: Client, prompt: Ids, right: list[int]) -> None:
            answer = Answer()
            self.arriving.append(answer)
            try:
                await client.stream(prompt, tokens, into=answer)
            except Exception as error:
                found.errors.append(f"{type(error).__name__}: {error}"[:160])
            found.add(answer.ids, right)

        self.arriving = []
        async with Client(self.process.url, self.host, seconds=SECONDS) as client:
            sent = [
                asyncio.create_task(one(client, prompt, right))
                for prompt, right in zip(prompts, expected, strict=True)
            ]
            if during is not None:
                await asyncio.sleep(1.0)
                await during()
            await asyncio.gather(*sent)
        return found

    async def all_arrive(self) -> None:
        """Wait until every answer has begun."""
        begin = time.monotonic()
        while not all(answer.ids for answer in self.arriving):
            if time.monotonic() - begin > SECONDS:
                raise TimeoutError(f"an answer did not begin within {SECONDS:.0f} s")
            await asyncio.sleep(0.02)

    async def hang_up(self, prompts: Sequence[Ids]) -> None:
        """Ask, and leave each answer after a token or two."""
        async with Client(self.process.url, self.host, seconds=SECONDS) as client:
            await asyncio.gather(
                *(
                    client.stream(prompt, 24, leave_after=1 + number % 2)
                    for number, prompt in enumerate(prompts)
                ),
                return_exceptions=True,
            )

    async def post(self, path: str, body: bytes = b"{}") -> int:
        """Ask one of the host's endpoints; returns the status."""

        def ask() -> int:
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            headers = {"Content-Type": "application/json"}
            request = urllib.request.Request(f"{self.process.url}{path}", body, headers)
            try:
                with opener.open(request, timeout=SECONDS) as response:
                    return int(response.status)
            except urllib.error.HTTPError as error:
                return int(error.code)

        return await asyncio.to_thread(ask)

    def family(self) -> list[psutil.Process]:
        """All processes of the server."""
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def decoding_process(self) -> psutil.Process:
        """The process that runs the model."""
        name = _DECODES[self.host]
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                if name in process.name() or any(name in word for word in process.cmdline()):
                    return process
        # SGLang may keep Python's name for its processes: the scheduler uses the most memory.
        return max(self.family()[1:], key=lambda process: process.memory_info().rss)


def start(
    host: str, folder: Path, model: Path, reference: Reference, armed: Sequence[str] = (),
    *, shared: Path | None = None, before: Callable[[int], object] | None = None,
    timeout: float = 580.0,
) -> TestedServer:  # fmt: skip
    """Start a server of `host` with the plugin; :meth:`ServerProcess.stop` ends it.

    Parameters
    ----------
    armed : sequence of str
        Faults that happen at the start.
    shared : Path, optional
        The package's cache folder; default: one of the server's own.
    before : callable, optional
        Gets the server's port before it starts.
    """
    faults = folder / "faults"
    faults.mkdir(parents=True)
    for name in armed:
        (faults / name).touch()
    paths = [str(INSIDE), str(ROOT), os.environ.get("PYTHONPATH", "")]
    settings = {
        **EAGER, "FAULTS": str(faults), "DEFT_CACHE_DIR": str(shared or folder / "cache"),
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "VLLM_SERVER_DEV_MODE": "1",
    }  # fmt: skip
    port = free_port()
    if before is not None:
        before(port)
    command = server_command(
        str(model), port, host=host, host_arguments=_FLAGS[host], environment=settings,
        gpu=False,
    )  # fmt: skip
    process = ServerProcess(command, folder / "server.log", timeout=timeout)
    process.__enter__()
    return TestedServer(process, host, faults, reference)
