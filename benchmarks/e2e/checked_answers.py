"""Answers of one server, checked token by token against the host's own backend."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.e2e.serving_rows import Row
from deft_backend.harness.answers import first_difference
from deft_backend.harness.client import Client

Sample = tuple[tuple[int, ...], list[int]]
"""A prompt and the answer to it."""

TOLERANCE = {"float32": 0.0, "float16": 0.05, "bfloat16": 0.26}
"""Two tokens whose log-probabilities are closer than this are a tie that rounding decides. A logit
of 16 to 32 has steps of 0.125 in bfloat16 and 0.016 in float16: two steps and a little. In float32
there is no such noise, and every other token is wrong."""


MOST_WRONG = 8
"""Wrong tokens of an answer after which there is no need to look further."""


@dataclass(frozen=True)
class OtherToken:
    """A token of an answer that is not the reference's."""

    where: str
    context: tuple[int, ...]
    token: int


@dataclass
class Checked:
    """What was found.

    Attributes
    ----------
    answers, tokens : int
        Looked at.
    ties : list of float
        For each token that differs within the tolerance, how much likelier the reference finds
        its own.
    wrong : list of str
        Every token that differs by more.
    """

    answers: int = 0
    tokens: int = 0
    ties: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def judge(self, other: OtherToken, gap: float, tolerance: float) -> None:
        """Count a token that is not the reference's, which finds its own likelier by `gap`."""
        if gap <= tolerance:
            self.ties.append(gap)
        else:
            self.wrong.append(f"{other.where}, {gap:.3g} less likely")

    def to_dict(self, tolerance: float) -> dict[str, Any]:
        """For a row."""
        return {
            "answers": self.answers, "tokens": self.tokens, "ties": len(self.ties),
            "largest_tie": round(max(self.ties), 6) if self.ties else None,
            "tolerance": tolerance, "wrong": len(self.wrong), "first_wrong": self.wrong[:5],
        }  # fmt: skip


async def check(
    samples: Sequence[Sample], client: Client, tolerance: float, at_once: int = 24
) -> Checked:
    """Ask the reference for the same answers and compare.

    After a token that differs the reference goes on from the checked answer's, so that every token
    of it is looked at, not just those before the first difference; after :data:`MOST_WRONG` that
    are wrong, or look so, the rest of an answer is left. No other check may run on the reference's
    server meanwhile.

    Parameters
    ----------
    samples : sequence
        Prompts with the answers to check.
    client : Client
        Of the reference's server.
    tolerance : float
        Difference of log-probability up to which another token is a tie.
    at_once : int
        Requests under way at once.
    """
    found = Checked()
    unlisted: list[OtherToken] = []
    free = asyncio.Semaphore(at_once)

    async def one(number: int, prompt: tuple[int, ...], answer: list[int]) -> None:
        async with free:
            await _check_answer(number, prompt, answer, client, tolerance, found, unlisted)

    await asyncio.gather(*(one(i, prompt, answer) for i, (prompt, answer) in enumerate(samples)))
    for other in unlisted:
        found.judge(other, await client.gap(other.context, other.token), tolerance)
    return found


async def _check_answer(
    number: int,
    prompt: tuple[int, ...],
    answer: list[int],
    client: Client,
    tolerance: float,
    found: Checked,
    unlisted: list[OtherToken],
) -> None:
    """Check one answer; tokens of whose log-probability the reference says nothing are listed."""
    at, wrong = 0, 0
    found.answers += 1
    while at < len(answer) and wrong < MOST_WRONG:
        rest = answer[at:]
        so_far = (*prompt, *answer[:at])
        (expected,), _ = await client.batch([so_far], len(rest), logprobs=True)
        differs = first_difference(expected.ids, rest)
        if differs is None:
            found.tokens += len(rest)
            return
        found.tokens += differs + 1
        gap = expected.gap_to(differs, rest[differs])
        other = OtherToken(
            f"answer {number} ({len(prompt)} tokens before), token {at + differs}: "
            f"{rest[differs]} instead of {expected.ids[differs]}",
            (*so_far, *rest[:differs]),
            rest[differs],
        )
        if gap is None:  # not among the few that the reference tells of: likely wrong
            unlisted.append(other)
        else:
            found.judge(other, gap, tolerance)
        wrong += gap is None or gap > tolerance
        at += differs + 1


def still_to_run(row: Row) -> str | None:
    """What is left to do about traffic whose answers the reference has not checked; None: nothing.

    A run may hold one backend alone, and nothing else would tell its user of the other.
    """
    options = row["detail"].get("check_with")
    if options is None:
        return None
    return f"not checked yet; run the same command with {options}, into the same --out"


def save_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Write prompts and answers, to be checked when the reference's server runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([[list(prompt), answer] for prompt, answer in samples]))


def load_samples(path: Path) -> list[Sample]:
    """What :func:`save_samples` wrote."""
    return [(tuple(prompt), answer) for prompt, answer in json.loads(path.read_text())]
