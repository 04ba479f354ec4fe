"""Answers of one server against another's, token by token.

In 16 bits two correct kernels round differently, so their greedy answers may differ where two
tokens are almost equally likely: such tokens are ties.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deft_backend.tools.harness.answers import EIGHT_BITS, Answer, first_difference
from deft_backend.tools.harness.client import ServerClient

Sample = tuple[tuple[int, ...], list[int]]
"""A prompt and the answer to it."""

Question = tuple[tuple[int, ...], int]
"""A prompt of the reference, and how many tokens it must answer."""

TOLERANCE = {"float32": 0.0, "float16": 0.05, "bfloat16": 0.26}
"""Two tokens with log-probabilities closer than this are a tie that rounding decides. A logit of 16
to 32 has steps of 0.125 in bfloat16 and 0.016 in float16; the tolerance is a little more than two
steps. In float32 there is no such noise, so every different token is wrong."""

MOST_WRONG = 8
"""After this many wrong tokens, the rest of an answer is not checked."""

LIKELIEST = 5
"""Tokens of a step whose log-probabilities the reference tells; no other token can be a tie."""


def tolerance_of(dtype: str, kv_dtype: str | None = None) -> float:
    """The tolerance for a model's dtype and, if it has one of its own, that of its KV cache."""
    eight_bits = kv_dtype is not None and kv_dtype.startswith("fp8")
    return TOLERANCE[dtype] * (EIGHT_BITS if eight_bits else 1.0)


def gap_to(answer: Answer, position: int, token: int) -> float | None:
    """How far an answer's log-probability exceeds that of `token` in the same place.

    None if `token` is not among the likeliest ones that the server named. Servers name tokens by
    id, or by the words of :mod:`benchmarks.e2e.served_model`.
    """
    likely: Mapping[Any, float] = answer.top[position]
    for name in (token, f"token_id:{token}", f"w{token}"):
        if name in likely:
            return answer.logprobs[position] - likely[name]
    return None


@dataclass
class Checked:
    """Counts of a check. `ties`: how much likelier the reference's own tokens are; `wrong`: each
    different token outside the tolerance."""

    answers: int = 0
    tokens: int = 0
    ties: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def to_dict(self, tolerance: float) -> dict[str, Any]:
        """The result as a row holds it."""
        return {
            "answers": self.answers,
            "tokens": self.tokens,
            "ties": len(self.ties),
            "largest_tie": round(max(self.ties), 6) if self.ties else None,
            "tolerance": tolerance,
            "wrong": len(self.wrong),
            "first_wrong": self.wrong[:5],
        }


async def check(
    samples: Sequence[Sample], client: ServerClient, tolerance: float, at_once: int = 24
) -> Checked:
    """Ask the reference's server for the same answers and compare, `at_once` at the same time.

    After a different token the reference continues from the checked answer, so the check covers
    every token and not only those before the first difference.
    """
    found = Checked()
    free = asyncio.Semaphore(at_once)

    async def one(number: int, prompt: tuple[int, ...], answer: list[int]) -> None:
        async with free:
            asking = answer_check(number, prompt, answer, tolerance, found)
            question = next_question(asking, None)
            while question is not None:
                context, tokens = question
                (expected,) = await client.batch([context], tokens, likeliest=LIKELIEST)
                question = next_question(asking, expected)

    await asyncio.gather(*(one(i, prompt, answer) for i, (prompt, answer) in enumerate(samples)))
    return found


def answer_check(
    number: int, prompt: tuple[int, ...], answer: list[int], tolerance: float, found: Checked
) -> Generator[Question, Answer | None, None]:
    """Check one answer: yields questions to the reference, and is sent their answers."""
    at, wrong = 0, 0
    found.answers += 1
    while at < len(answer) and wrong < MOST_WRONG:
        rest = answer[at:]
        expected = yield (*prompt, *answer[:at]), len(rest)
        assert expected is not None
        differs = first_difference(expected.ids, rest)
        if differs is None:
            found.tokens += len(rest)
            return
        found.tokens += differs + 1
        gap = gap_to(expected, differs, rest[differs])
        if gap is not None and gap <= tolerance:
            found.ties.append(gap)
        else:
            wrong += 1
            less = "not among the likeliest" if gap is None else f"{gap:.3g} less likely"
            found.wrong.append(
                f"answer {number} ({len(prompt)} tokens before), token {at + differs}: "
                f"{rest[differs]} instead of {expected.ids[differs]}, {less}"
            )
        at += differs + 1


def next_question(
    asking: Generator[Question, Answer | None, None], reply: Answer | None
) -> Question | None:
    """The next question of an answer's check, or None after the last; the first needs no reply."""
    try:
        return asking.send(reply)
    except StopIteration:
        return None


def compare(reference: Sequence[Answer], other: Sequence[Answer]) -> dict[str, Any]:
    """Agreement of two servers' answers to the same prompts, up to their first different tokens.

    ``gap_where_parted_max`` is the reference's largest preference for its own token, and
    ``parted_outside_top`` counts tokens that are not among its likeliest.
    """
    differences: list[float] = []
    gaps: list[float | None] = []
    for left, right in zip(reference, other, strict=True):
        differs = first_difference(left.ids, right.ids)
        agreed = len(left.ids) if differs is None else differs
        pairs = zip(left.logprobs[:agreed], right.logprobs[:agreed], strict=True)
        differences += [abs(a - b) for a, b in pairs]
        if differs is not None:
            gaps.append(gap_to(left, differs, right.ids[differs]))
    ordered = sorted(differences)
    return {
        "requests": len(reference),
        "equal_answers": len(reference) - len(gaps),
        "compared_tokens": len(ordered),
        "logprob_difference_median": ordered[len(ordered) // 2] if ordered else None,
        "logprob_difference_p99": ordered[99 * len(ordered) // 100] if ordered else None,
        "logprob_difference_max": max(ordered, default=None),
        "gap_where_parted_max": max((gap for gap in gaps if gap is not None), default=None),
        "parted_outside_top": sum(gap is None for gap in gaps),
    }
