"""A server under test: its faults, its answers, its log and its end."""

import asyncio
import random
import re
import time
from contextlib import contextmanager

import psutil

from benchmarks.e2e.run import client_of
from deft_backend.tools.harness.answers import Answer
from integration_tests.common.server import EAGER, Group, started
from integration_tests.hosts import HOST, HostServer, command_of

SECONDS = 240.0
"""Longest time of a request; a longer one counts as a hang."""

_FLAGS = {"sglang": "--max-total-tokens 8192", "vllm": "--block-size 32 --max-model-len 1024"}
_DECODES = {"sglang": "scheduler", "vllm": "EngineCore"}
VERDICTS = ("right", "wrong", "lost", "cut")
"""What becomes of an answer. It is whole and right, it has a wrong token, it has no token, or it
was cut off after right tokens."""


def draw_prompts(seed, count, shared, own):
    """Prompts of random tokens that share a prefix, each with a tail of its own."""
    choose = random.Random(seed)

    def draw(tokens):
        return tuple(choose.randrange(256) for _ in range(tokens))

    prefix = draw(shared)
    return [prefix + draw(choose.randint(1, own)) for _ in range(count)]


def verdict(found, right):
    """What became of an answer whose right tokens are known."""
    if list(found) != list(right[: len(found)]):
        return "wrong"
    return "right" if len(found) == len(right) else "cut" if len(found) else "lost"


class TestedServer(HostServer):
    """A server whose faults are armed by files."""

    __test__ = False

    def __init__(self, process, state_dir, faults, reference):
        super().__init__(process, state_dir)
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
        """Send all prompts at once and count the verdicts; `during` runs while they decode."""
        expected = [self._reference.greedy(prompt, tokens)[0] for prompt in prompts]
        found, errors = dict.fromkeys(VERDICTS, 0), []

        async def one(client, prompt, right):
            answer = Answer()
            self.arriving.append(answer)
            try:
                await client.ask(prompt, tokens, into=answer)
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}"[:160])
            found[verdict(answer.ids, right)] += 1

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
        return {**found, "errors": errors[:2]}

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
        return next(each for each in self.family() if _DECODES[HOST] in " ".join(each.cmdline()))


@contextmanager
def under_test(folder, reference, armed, shared, before=None):
    """A server with the plugin for a `with` block.

    - `armed`: faults that happen at the start.
    - `shared`: the package's cache folder.
    - `before`: gets the server's port before it starts.
    """
    faults = folder / "faults"
    faults.mkdir(parents=True)
    for name in armed:
        (faults / name).touch()
    settings = {**EAGER, "FAULTS": str(faults), "DEFT_CACHE_DIR": str(shared)}
    settings |= {"DEFT_VERIFY": "0", "DEFT_LOG": "info"}  # as users run it
    group = Group(_FLAGS[HOST], settings, ("integration_tests.faults.inside:install",))
    command = command_of("deft", group, folder)
    if before is not None:
        before(command.port)
    with started(command, folder, lambda *given: TestedServer(*given, faults, reference)) as server:
        yield server
