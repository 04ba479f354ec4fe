"""Batches of prompts as token ids, the same on every machine."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.e2e.served_model import Model

GRID = (
    (0, 1, 1024), (0, 32, 2048), (4096, 32, 64), (4096, 128, 64), (16384, 64, 64), (65536, 32, 64),
)  # fmt: skip
"""Prefix, branches and suffix of the cases that compare releases."""

SCHEDULER_GRID = ((0, 32, 256), (2048, 32, 64))
"""Cases for the one-layer shape: without and with sharing."""


class CaseError(ValueError):
    """The sizes are impossible, or they exceed the model's context."""


@dataclass(frozen=True)
class Case:
    """Prompts that are sent together.

    Attributes
    ----------
    workload : str
        Name in the rows.
    prefix, branches, suffix : int
        Tokens of the shared prefix, number of prompts, tokens of each prompt behind the prefix.
    warm : tuple
        Prompts sent before, one after another, so that the host has cached the shared prefixes.
    prompts : tuple
        Token ids of every prompt.
    """

    workload: str
    prefix: int
    branches: int
    suffix: int
    warm: tuple[tuple[int, ...], ...]
    prompts: tuple[tuple[int, ...], ...]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(len(prompt) for prompt in self.prompts)


@dataclass(frozen=True)
class Sizes:
    """A case as the user typed it: of one workload, or of each (None); with output tokens or not.

    Attributes
    ----------
    workload : str, optional
    sizes : tuple of int
        Tokens of the prefix, branches, and tokens of each branch.
    gen : int, optional
    """

    workload: str | None
    sizes: tuple[int, int, int]
    gen: int | None


def parse_sizes(text: str) -> Sizes:
    """``[WORKLOAD:]PREFIX,BRANCHES,SUFFIX[:TOKENS]``.

    Raises
    ------
    CaseError
        If the text has another form, or describes no request.

    Examples
    --------
    >>> parse_sizes("rollouts:2000,16,16:1500")
    Sizes(workload='rollouts', sizes=(2000, 16, 16), gen=1500)
    """
    found = re.fullmatch(r"(?:([a-z-]+):)?([^:]*)(?::([1-9]\d*))?", text)
    workload, sizes, gen = found.groups() if found else (None, text, None)
    return Sizes(workload, parse_case(sizes), int(gen) if gen else None)


def parse_case(text: str) -> tuple[int, int, int]:
    """``PREFIX,BRANCHES,SUFFIX`` in tokens, requests, tokens.

    Raises
    ------
    CaseError
        If the text has another form, or describes no request.
    """
    try:
        prefix, branches, suffix = (int(part) for part in text.split(","))
    except ValueError:
        prefix = branches = suffix = -1
    if prefix < 0 or branches < 1 or suffix < 1:
        raise CaseError(
            f"the case {text!r} is not PREFIX,BRANCHES,SUFFIX: tokens, requests, tokens; expected "
            "for example 16384,64,64, with a prefix of 0 for prompts that share nothing"
        )
    return prefix, branches, suffix


def grid_case(model: Model, prefix: int, branches: int, suffix: int, name: str = "") -> Case:
    """Branches on one prefix; with a prefix of 0 they share nothing."""
    ids = random.Random(f"{prefix} {branches} {suffix}")
    shared = draw(ids, model, prefix)
    prompts = tuple(shared + draw(ids, model, suffix) for _ in range(branches))
    named = name or ("few-shot" if prefix else "unshared")
    return Case(named, prefix, branches, suffix, prompts[:1] if prefix else (), prompts)


@dataclass(frozen=True)
class Documents:
    """Questions about several documents, mixed with requests that share nothing.

    Attributes
    ----------
    documents, tokens : int
        Number of documents, and tokens of each.
    questions, question_tokens : int
        Questions about each document, and tokens of each question.
    loners, loner_tokens : int
        Requests that share nothing, and tokens of each.
    """

    documents: int = 4
    tokens: int = 8192
    questions: int = 16
    question_tokens: int = 64
    loners: int = 16
    loner_tokens: int = 1024

    def case(self, model: Model) -> Case:
        """The prompts in random order."""
        ids = random.Random(repr(self))
        texts = [draw(ids, model, self.tokens) for _ in range(self.documents)]
        prompts = [
            text + draw(ids, model, self.question_tokens)
            for text in texts
            for _ in range(self.questions)
        ]
        prompts += [draw(ids, model, self.loner_tokens) for _ in range(self.loners)]
        ids.shuffle(prompts)
        return Case(
            f"document-questions ({self.documents} documents, {self.loners} loners)", self.tokens,
            len(prompts), self.question_tokens, tuple(texts), tuple(prompts),
        )  # fmt: skip


def draw(ids: random.Random, model: Model, count: int) -> tuple[int, ...]:
    """Random token ids."""
    return tuple(ids.choices(range(model.ids), k=count))


def check_fits(case: Case, tokens: int, model: Model) -> None:
    """Refuse a case whose requests exceed the model's context.

    Raises
    ------
    CaseError
        With the lengths.
    """
    if case.longest + tokens > model.context:
        raise CaseError(
            f"{case.workload}: prompts of {case.longest} tokens and answers of {tokens} do not fit "
            f"the {model.context} positions of {model.name}; choose shorter ones"
        )


def percentile(values: Sequence[float], share: float) -> float | None:
    """The nearest-rank percentile: `share` of all values do not exceed it. None without any."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
