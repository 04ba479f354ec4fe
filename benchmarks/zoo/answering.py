"""Ask a host's engine, and check another engine's answers token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from benchmarks.e2e.checked_answers import MOST_WRONG, tolerance_of
from benchmarks.e2e.kept_answers import gap_to
from benchmarks.zoo.prompts import Prompt
from deft_backend.tools.harness.answers import Answer, first_difference


class Engine(Protocol):
    """A host's engine in this process."""

    def answer(self, prompts: Sequence[Prompt], tokens: Sequence[int]) -> list[Answer]:
        """Greedy answers of exactly these lengths, all prompts in one batch, with log-probabilities
        of the likeliest tokens."""
        ...


@dataclass
class Verdict:
    """Checked tokens of all answers."""

    tokens: int = 0
    wrong: int = 0
    ties: int = 0
    first_wrong: list[str] = field(default_factory=list)


def check(
    engine: Engine,
    prompts: Sequence[Prompt],
    answers: Sequence[Sequence[int]],
    dtype: str,
    kv_dtype: str | None = None,
) -> Verdict:
    """Compare with what `engine` answers.

    After a different token the engine continues from the checked answer, so the check covers every
    token. A different token that the engine finds as likely, up to rounding in `dtype` and
    in the KV cache's `kv_dtype`, is a tie.
    """
    found = Verdict()
    tolerance = tolerance_of(dtype, kv_dtype)
    at = dict.fromkeys(range(len(prompts)), 0)
    wrong = dict.fromkeys(at, 0)
    while at:
        asked = [(*prompts[index], *answers[index][:begin]) for index, begin in at.items()]
        lengths = [len(answers[index]) - begin for index, begin in at.items()]
        for (index, begin), expected in zip(
            list(at.items()), engine.answer(asked, lengths), strict=True
        ):
            rest = answers[index][begin:]
            differs = first_difference(expected.ids, rest)
            found.tokens += len(rest) if differs is None else differs + 1
            if differs is not None:
                gap = gap_to(expected, differs, rest[differs])
                if gap is not None and gap <= tolerance:
                    found.ties += 1
                else:
                    found.wrong += 1
                    wrong[index] += 1
                    less = "not among the likeliest" if gap is None else f"{gap:.3g} less likely"
                    found.first_wrong.append(
                        f"answer {index}, token {begin + differs}: {rest[differs]} instead of "
                        f"{expected.ids[differs]}, {less}"
                    )
                at[index] = begin + differs + 1
            if differs is None or at[index] >= len(answers[index]) or wrong[index] >= MOST_WRONG:
                del at[index]
    return found
