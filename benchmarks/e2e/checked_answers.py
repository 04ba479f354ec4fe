"""Answers of one server, checked token by token against the host's own backend."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.e2e.kept_answers import gap_to
from benchmarks.e2e.serving_rows import Row
from benchmarks.token_client.client import Client
from deft_backend.tools.harness.answers import EIGHT_BITS, first_difference

Sample = tuple[tuple[int, ...], list[int]]
"""A prompt and the answer to it."""

TOLERANCE = {"float32": 0.0, "float16": 0.05, "bfloat16": 0.26}
"""Two tokens with log-probabilities closer than this are a tie that rounding decides. A logit of 16
to 32 has steps of 0.125 in bfloat16 and 0.016 in float16; the tolerance is a little more than two
steps. In float32 there is no such noise, so every different token is wrong."""


def tolerance_of(dtype: str, kv_dtype: str | None = None) -> float:
    """The tolerance for a model's dtype and, if it has one of its own, that of its KV cache."""
    eight_bits = kv_dtype is not None and kv_dtype.startswith("fp8")
    return TOLERANCE[dtype] * (EIGHT_BITS if eight_bits else 1.0)


MOST_WRONG = 8
"""After this many wrong tokens, the rest of an answer is not checked."""


@dataclass(frozen=True)
class OtherToken:
    """A token of an answer that differs from the reference's."""

    where: str
    context: tuple[int, ...]
    token: int


@dataclass
class Checked:
    """The result of a check.

    Attributes
    ----------
    answers, tokens : int
        Checked answers and tokens.
    ties : list of float
        For each different token within the tolerance: how much likelier the reference's own
        token is.
    wrong : list of str
        Each different token outside the tolerance.
    """

    answers: int = 0
    tokens: int = 0
    ties: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def judge(self, other: OtherToken, gap: float, tolerance: float) -> None:
        """Count a different token; the reference's own is likelier by `gap` (log-probability)."""
        if gap <= tolerance:
            self.ties.append(gap)
        else:
            self.wrong.append(f"{other.where}, {gap:.3g} less likely")

    def to_dict(self, tolerance: float) -> dict[str, Any]:
        """The result as a row holds it."""
        return {
            "answers": self.answers, "tokens": self.tokens, "ties": len(self.ties),
            "largest_tie": round(max(self.ties), 6) if self.ties else None,
            "tolerance": tolerance, "wrong": len(self.wrong), "first_wrong": self.wrong[:5],
        }  # fmt: skip


async def check(
    samples: Sequence[Sample], client: Client, tolerance: float, at_once: int = 24
) -> Checked:
    """Ask the reference for the same answers and compare.

    After a different token the reference continues from the checked answer, so the check covers
    every token and not only those before the first difference. After :data:`MOST_WRONG` wrong
    tokens it skips the rest of the answer. No other check may run on the reference's server
    meanwhile.

    Parameters
    ----------
    samples : sequence
        Prompts, each with the answer to check.
    client : Client
        Client of the reference's server.
    tolerance : float
        Largest difference of log-probability that counts as a tie.
    at_once : int
        Requests in flight at the same time.
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
    """Check one answer; `unlisted` gets tokens without a log-probability of the reference."""
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
        gap = gap_to(expected, differs, rest[differs])
        other = OtherToken(
            f"answer {number} ({len(prompt)} tokens before), token {at + differs}: "
            f"{rest[differs]} instead of {expected.ids[differs]}",
            (*so_far, *rest[:differs]),
            rest[differs],
        )
        if gap is None:  # the reference does not list it among its likeliest tokens: probably wrong
            unlisted.append(other)
        else:
            found.judge(other, gap, tolerance)
        wrong += gap is None or gap > tolerance
        at += differs + 1


def still_to_run(row: Row) -> str | None:
    """How to check a row's traffic against the reference; None if the check is done or not needed.
    A run can hold one backend alone, and nothing else tells its user to run the reference.
    """
    options = row["detail"].get("check_with")
    if options is None:
        return None
    return f"not checked yet; run the same command with {options}, into the same --out"


def save_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Write prompts and answers, for the check when the reference's server runs."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([[list(prompt), answer] for prompt, answer in samples]))


def load_samples(path: Path) -> list[Sample]:
    """The samples that :func:`save_samples` wrote."""
    return [(tuple(prompt), answer) for prompt, answer in json.loads(path.read_text())]
