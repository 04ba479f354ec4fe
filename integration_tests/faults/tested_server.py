"""A server under test: its faults, its answers, its log and its end."""

import asyncio
import contextlib
import os
import random
import re
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from benchmarks.e2e.run import client_of
from deft_backend.tools.harness.answers import Answer
from deft_backend.tools.servers.command import free_port, server_command
from deft_backend.tools.servers.process import ServerProcess
from integration_tests.common.plugins import CPU_BACKEND, plugin_settings
from integration_tests.common.server import MODEL
from integration_tests.hosts import HOST, HostServer

INSIDE = Path(__file__).parent / "inside"
SECONDS = 240.0
"""Longest time of a request; a longer one counts as a hang."""

_FLAGS = {
    "sglang": ("--max-running-requests", "32", "--max-total-tokens", "8192"),
    "vllm": ("--max-num-seqs", "32", "--block-size", "32", "--max-model-len", "1024"),
}
_DECODES = {"sglang": "scheduler", "vllm": "EngineCore"}


def draw_prompts(seed, count, shared, own, vocabulary=256):
    """Prompts of random tokens that share a prefix, each with a tail of its own."""
    choose = random.Random(seed)

    def draw(tokens):
        return tuple(choose.randrange(vocabulary) for _ in range(tokens))

    prefix = draw(shared)
    return [prefix + draw(choose.randint(1, own)) for _ in range(count)]


@dataclass
class Judged:
    """Answers compared with the reference.

    `right`: whole right answers; `wrong`: answers with a wrong token; `lost`: requests without any
    token; `cut`: answers that were cut off after some tokens, all of them right.
    """

    right: int = 0
    wrong: int = 0
    lost: int = 0
    cut: int = 0
    errors: list = field(default_factory=list)

    def add(self, found, right):
        if list(found) != list(right[: len(found)]):
            self.wrong += 1
        elif len(found) == len(right):
            self.right += 1
        elif found:
            self.cut += 1
        else:
            self.lost += 1

    def to_dict(self):
        """The counts as the record holds them."""
        return {**asdict(self), "errors": self.errors[:2]}

    def __add__(self, other):
        left, right = vars(self), vars(other)
        return Judged(**{name: left[name] + right[name] for name in left})


class TestedServer(HostServer):
    """A server whose faults are armed by files."""

    __test__ = False

    def __init__(self, process, faults, reference):
        super().__init__(process, faults.parent)
        self.arriving = []
        self._faults = faults
        self._reference = reference
        self._told = set()

    def arm(self, name):
        (self._faults / name).touch()

    def disarm(self, name):
        """End a fault; returns how often it happened."""
        (self._faults / name).unlink(missing_ok=True)
        record = self._faults / f"{name}.done"
        count = len(record.read_text().split()) if record.exists() else 0
        record.unlink(missing_ok=True)
        return count

    def new_log_lines(self, pattern):
        """Lines of the server's log that match, without those of an earlier call."""
        found = [line for line in self.log.splitlines() if re.search(pattern, line)]
        new = [line for line in dict.fromkeys(found) if line not in self._told]
        self._told.update(new)
        return new

    async def judged(self, prompts, tokens, during=None):
        """Send all prompts at once and judge the answers; `during` runs while they decode."""
        expected = [self._reference.greedy(prompt, tokens)[0] for prompt in prompts]
        found = Judged()

        async def one(client, prompt, right):
            answer = Answer()
            self.arriving.append(answer)
            try:
                await client.ask(prompt, tokens, into=answer)
            except Exception as error:
                found.errors.append(f"{type(error).__name__}: {error}"[:160])
            found.add(answer.ids, right)

        self.arriving = []
        async with client_of(self.process.url, seconds=SECONDS) as client:
            sent = [
                asyncio.create_task(one(client, prompt, right))
                for prompt, right in zip(prompts, expected, strict=True)
            ]
            if during is not None:
                await asyncio.sleep(1.0)
                await during()
            await asyncio.gather(*sent)
        return found

    async def all_arrive(self):
        begin = time.monotonic()
        while not all(answer.ids for answer in self.arriving):
            if time.monotonic() - begin > SECONDS:
                raise TimeoutError(f"an answer did not begin within {SECONDS:.0f} s")
            await asyncio.sleep(0.02)

    async def hang_up(self, prompts):
        """Ask, and leave each answer after a token or two."""
        async with client_of(self.process.url, seconds=SECONDS) as client:
            leaving = (
                client.ask(prompt, 24, leave_after=1 + number % 2)
                for number, prompt in enumerate(prompts)
            )
            await asyncio.gather(*leaving, return_exceptions=True)

    def family(self):
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def decoding_process(self):
        name = _DECODES[HOST]
        for process in self.family():
            with contextlib.suppress(psutil.Error):
                if name in process.name() or any(name in word for word in process.cmdline()):
                    return process
        # SGLang may keep Python's name for its processes: the scheduler uses the most memory.
        return max(self.family()[1:], key=lambda process: process.memory_info().rss)


def start(folder, reference, armed=(), *, shared, before=None):
    """Start a server with the plugin; its process's `stop` ends it.

    - `armed`: faults that happen at the start.
    - `shared`: the package's cache folder.
    - `before`: gets the server's port before it starts.
    """
    faults = folder / "faults"
    faults.mkdir(parents=True)
    for name in armed:
        (faults / name).touch()
    targets = [CPU_BACKEND] if HOST == "vllm" else []
    paths = [str(INSIDE), plugin_settings(folder / "plugins", *targets)["PYTHONPATH"]]
    settings = {
        "DEFT_MIN_BATCH": "1",
        "FAULTS": str(faults),
        "DEFT_CACHE_DIR": str(shared),
        "PYTHONPATH": os.pathsep.join(paths),
        "VLLM_SERVER_DEV_MODE": "1",
    }
    port = free_port()
    if before is not None:
        before(port)
    command = server_command(
        str(MODEL), port, host=HOST, host_arguments=_FLAGS[HOST], environment=settings, gpu=False
    )
    process = ServerProcess(command, folder / "server.log", timeout=580.0)
    process.__enter__()
    return TestedServer(process, faults, reference)
