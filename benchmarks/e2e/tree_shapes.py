"""The trees that people grow, as data: which requests share what, fork, and come back.

A shape makes a workload of token ids. Each repeat gets other ids behind the shared prefix, so only
the prefix is cached.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from benchmarks.e2e.prompt_cases import draw
from benchmarks.e2e.served_model import Model
from benchmarks.token_client.send_requests import TreeRequest
from deft_backend.tools.harness.workload import Request, Workload

SHORTEST = 16
"""The longest answer of a rollout divided by its shortest one."""

WARM_UP_TOKENS = 8
"""Most tokens of a rollout's answer in the repeat that does not count."""


@dataclass(frozen=True)
class TreeShape(ABC):
    """Sizes of a tree, and its requests.

    Attributes
    ----------
    prefix, branches, suffix, gen : int
        Tokens of the shared prefix, branches, tokens of each behind the prefix, and output tokens.
    """

    prefix: int
    branches: int
    suffix: int
    gen: int
    sleeps: ClassVar[bool] = False
    """Whether the server frees its memory and takes it back before each repeat that counts."""
    whole: ClassVar[bool] = False
    """Whether the time counts from the first prompt. Otherwise, shared prefixes are cached."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The workload's name in rows."""

    @property
    def longest(self) -> int:
        """Tokens of the longest request, with its answer."""
        return self.prefix + self.suffix + self.gen

    @abstractmethod
    def workload(self, model: Model, repeat: int) -> Workload:
        """The requests of a repeat; repeat 0 does not count."""


@dataclass(frozen=True)
class Beams(TreeShape):
    """One beam search of `branches` beams: they share the prompt, and fork in every step."""

    @property
    def name(self) -> str:
        return "beams"

    def workload(self, model: Model, repeat: int) -> Workload:
        ids = _ids(self, repeat)
        prompt = draw(_ids(self), model, self.prefix)
        request = TreeRequest(
            "beams", prompt + draw(ids, model, self.suffix), self.gen, beams=self.branches
        )
        return Workload(self.name, "", (prompt,), (request,))


@dataclass(frozen=True)
class Rollouts(TreeShape):
    """Samples of prompts, as a trainer draws them, with a long tail of lengths.

    Each of `suffix` prompts has `prefix` tokens and `branches` samples, the longest of `gen`.
    """

    sleeps: ClassVar[bool] = True
    whole: ClassVar[bool] = True

    @property
    def name(self) -> str:
        return "rollouts"

    @property
    def longest(self) -> int:
        return self.prefix + self.gen

    def workload(self, model: Model, repeat: int) -> Workload:
        ids = _ids(self, repeat)
        prompts = tuple(draw(ids, model, self.prefix) for _ in range(self.suffix))
        lengths = self._lengths()
        if not repeat:
            lengths = [min(length, WARM_UP_TOKENS) for length in lengths]
        names = [(p, s) for p in range(self.suffix) for s in range(self.branches)]
        return Workload(self.name, "", prompts, tuple(
            TreeRequest(f"prompt {p}, sample {s}", prompts[p], length, sampled=True)
            for (p, s), length in zip(names, lengths, strict=True)
        ))  # fmt: skip

    def _lengths(self) -> list[int]:
        """Log-normal lengths from the longest's sixteenth on; the first one is the longest.

        Every repeat has the same lengths, so that repeats differ by noise alone.
        """
        ids = _ids(self)
        least = max(1, self.gen // SHORTEST)
        drawn = [
            min(self.gen, round(least * ids.lognormvariate(1.0, 0.8)) + least)
            for _ in range(self.suffix * self.branches - 1)
        ]
        return [self.gen, *drawn]


@dataclass(frozen=True)
class Sessions(TreeShape):
    """Sessions on one history: each asks, forks sub-agents, and goes on with what they return.

    Attributes
    ----------
    forks : int
        Sub-agents of a turn; 0: a chat, or calls of tools.
    turns : int
        Turns after the first.
    """

    forks: int = 3
    turns: int = 2

    @property
    def name(self) -> str:
        kind = f"agents ({self.forks} sub-agents, " if self.forks else "chats ("
        return f"{kind}{self.turns + 1} turns)"

    @property
    def longest(self) -> int:
        turn = self.suffix + self.gen * (1 + self.forks)
        return self.prefix + self.suffix + self.gen + self.turns * turn

    def workload(self, model: Model, repeat: int) -> Workload:
        history = draw(_ids(self), model, self.prefix)
        own = _ids(self, repeat)
        found: list[Request] = []
        for session in range(self.branches):
            found += self._session(session, history, lambda: draw(own, model, self.suffix))
        return Workload(self.name, "", (history,), tuple(found))

    def _session(
        self, session: int, history: tuple[int, ...], own: Callable[[], tuple[int, ...]]
    ) -> Iterator[Request]:
        before = f"session {session}, start"
        yield TreeRequest(before, history + own(), self.gen)
        for turn in range(self.turns):
            forks = tuple(f"session {session}, fork {turn}.{fork}" for fork in range(self.forks))
            for name in forks:
                yield TreeRequest(name, own(), self.gen, after=before)
            name = f"session {session}, return {turn}"
            yield TreeRequest(name, own(), self.gen, after=before, returned=forks)
            before = name


def _ids(shape: TreeShape, repeat: int | None = None) -> random.Random:
    """Chance that only the shape and the repeat determine, on every machine."""
    return random.Random(f"{shape!r} {'' if repeat is None else repeat}")
