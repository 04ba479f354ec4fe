"""How far two servers' greedy answers to the same prompts agree.

In 16 bits two correct kernels round differently, and greedy answers part where two tokens are
equally likely up to that. How far two of the host's own backends differ says what that noise is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.e2e.prompt_cases import percentile
from deft_backend.harness.client import Client, Completion

REQUESTS = 16
TOKENS = 32
"""What is kept of a case to compare: enough to tell noise from error, small enough to keep."""


async def ask(client: Client, prompts: Sequence[Sequence[int]], tokens: int) -> list[Completion]:
    """The first prompts' answers with log-probabilities, all in one batch with the others."""
    answers, _ = await client.batch(prompts, min(tokens, TOKENS), logprobs=True)
    return answers[:REQUESTS]


def keep(path: Path, answers: Sequence[Completion]) -> None:
    """Write answers for a later comparison."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([asdict(answer) for answer in answers]))


def kept(path: Path) -> list[Completion] | None:
    """Answers that :func:`keep` wrote, if there are any."""
    try:
        content = json.loads(path.read_text())
    except OSError:
        return None
    for answer in content:  # JSON's keys are text
        answer["top"] = [{int(i): value for i, value in top.items()} for top in answer["top"]]
    return [Completion(**answer) for answer in content]


def compare(reference: Sequence[Completion], other: Sequence[Completion]) -> dict[str, Any]:
    """Agreement up to where greedy decoding parts.

    Returns
    -------
    dict
        ``requests``, ``equal_answers``, ``compared_tokens``, the ``logprob_difference`` over these
        tokens (median, p99, max), and where answers part how much likelier the reference finds its
        own token at most (``gap_where_parted_max``), or how often not even among its first five
        (``parted_outside_top``).
    """
    differences: list[float] = []
    gaps: list[float | None] = []
    for theirs, ours in zip(reference, other, strict=True):
        parted = next(
            (i for i, (a, b) in enumerate(zip(theirs.ids, ours.ids, strict=True)) if a != b), None
        )
        pairs = zip(theirs.logprobs[:parted], ours.logprobs[:parted], strict=True)
        differences += [abs(a - b) for a, b in pairs]
        if parted is not None:
            gaps.append(gap_to(theirs, parted, ours.ids[parted]))
    return {
        "requests": len(reference),
        "equal_answers": len(reference) - len(gaps),
        "compared_tokens": len(differences),
        "logprob_difference_median": percentile(differences, 0.5),
        "logprob_difference_p99": percentile(differences, 0.99),
        "logprob_difference_max": max(differences, default=None),
        "gap_where_parted_max": max((gap for gap in gaps if gap is not None), default=None),
        "parted_outside_top": sum(gap is None for gap in gaps),
    }


def gap_to(reference: Completion, position: int, other: int) -> float | None:
    """How much likelier the reference finds its own token there than `other`.

    None if `other` is not among the reference's likeliest.
    """
    likely = reference.top[position]
    return reference.logprobs[position] - likely[other] if other in likely else None
