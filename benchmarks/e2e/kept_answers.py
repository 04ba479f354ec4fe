"""Files that keep answers for a later comparison with another server's answers.

In 16 bits two correct kernels round differently. So their greedy answers may differ if two tokens
are almost equally likely. The difference between two of the host's own backends shows how much.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.e2e.prompt_cases import percentile
from benchmarks.token_client.client import Client
from deft_backend.tools.harness.answers import Answer, first_difference

REQUESTS = 16
TOKENS = 32
"""Answers and tokens to keep for a case: enough to distinguish noise from error."""


async def ask(client: Client, prompts: Sequence[Sequence[int]], tokens: int) -> list[Answer]:
    """Answers to the first prompts, with log-probabilities; all prompts are in one batch."""
    answers, _ = await client.batch(prompts, min(tokens, TOKENS), logprobs=True)
    return answers[:REQUESTS]


def keep(path: Path, answers: Sequence[Answer]) -> None:
    """Write answers to a file for a later comparison."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(answer) for answer in answers]))


def kept(path: Path) -> list[Answer] | None:
    """The answers that :func:`keep` wrote; None if there is no such file."""
    try:
        content = json.loads(path.read_text())
    except OSError:
        return None
    for answer in content:  # keys of JSON objects are text
        answer["top"] = [{int(i): value for i, value in top.items()} for top in answer["top"]]
    return [Answer(**answer) for answer in content]


def compare(reference: Sequence[Answer], other: Sequence[Answer]) -> dict[str, Any]:
    """Agreement of two servers' answers to the same prompts, up to their first different tokens.

    Returns
    -------
    dict
        ``requests``, ``equal_answers``, ``compared_tokens``, and the ``logprob_difference`` over
        these tokens (median, p99, max). For different tokens: the reference's largest preference
        for its own token (``gap_where_parted_max``), and how often the other token is not among its
        five likeliest (``parted_outside_top``).
    """
    differences: list[float] = []
    gaps: list[float | None] = []
    agreed = 0
    for theirs, ours in zip(reference, other, strict=True):
        found = compare_answers(theirs, ours)
        differences += found.differences
        agreed += found.agreed
        if not found.same:
            known = len(theirs.top) > found.agreed
            gaps.append(gap_to(theirs, found.agreed, ours.ids[found.agreed]) if known else None)
    return {
        "requests": len(reference),
        "equal_answers": len(reference) - len(gaps),
        "compared_tokens": agreed,
        "logprob_difference_median": percentile(differences, 0.5),
        "logprob_difference_p99": percentile(differences, 0.99),
        "logprob_difference_max": max(differences, default=None),
        "gap_where_parted_max": max((gap for gap in gaps if gap is not None), default=None),
        "parted_outside_top": sum(gap is None for gap in gaps),
    }


@dataclass(frozen=True)
class Comparison:
    """Two answers to one prompt, up to the first token in which they differ."""

    agreed: int  # tokens before the first difference
    same: bool  # whether the answers have the same tokens and the same length
    # Absolute difference of the log-probabilities of each agreed token.
    differences: tuple[float, ...]


def gap_to(answer: Answer, position: int, token: int) -> float | None:
    """How far an answer's log-probability exceeds that of `token` in the same place.

    None if `token` is not among the likeliest ones that the server named.
    """
    likely = answer.top[position]
    return answer.logprobs[position] - likely[token] if token in likely else None


def compare_answers(reference: Answer, other: Answer) -> Comparison:
    """Compare two answers token by token, by ids if both servers gave all of them, else by text."""
    left: Sequence[object] = reference.ids
    right: Sequence[object] = other.ids
    if len(left) < len(reference) or len(right) < len(other):
        left, right = reference.tokens, other.tokens
    differs = first_difference(left, right)
    agreed = min(len(left), len(right)) if differs is None else differs
    pairs = zip(reference.logprobs[:agreed], other.logprobs[:agreed], strict=True)
    return Comparison(
        agreed, agreed == len(left) == len(right), tuple(abs(a - b) for a, b in pairs)
    )
