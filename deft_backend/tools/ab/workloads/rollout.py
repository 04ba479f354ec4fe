"""Rollouts: many samples of one prompt with long answers of unequal length, as in RL."""

from __future__ import annotations

import random
from dataclasses import dataclass

from deft_backend.tools.ab.invented_text import passage, question
from deft_backend.tools.harness.request_plan import Request, RequestPlan, at_least_one


@dataclass(frozen=True)
class Rollout:
    """`samples` requests with one prompt. Answers have `mean_tokens` tokens on average.

    Each answer has its own length (log-normal, at most four times the mean), so answers end one by
    one, and the last ones decode almost alone. Decoding is greedy, so that tokens can be compared.
    """

    samples: int = 8
    prefix_characters: int = 600
    mean_tokens: int = 48
    seed: int = 4

    def plan(self) -> RequestPlan:
        at_least_one(
            samples=self.samples,
            prefix_characters=self.prefix_characters,
            mean_tokens=self.mean_tokens,
        )
        chance = random.Random(f"rollout {self.seed}")
        notes = passage(self.prefix_characters, self.seed)
        prompt = notes + question(0, notes)
        drawn = [self.mean_tokens * chance.lognormvariate(-0.2, 0.63) for _ in range(self.samples)]
        lengths = [max(1, min(round(length), 4 * self.mean_tokens)) for length in drawn]
        return RequestPlan(
            f"rollout-{self.samples}",
            f"{self.samples} samples of one prompt of {len(prompt)} characters, answers of "
            f"{min(lengths)} to {max(lengths)} tokens",
            (prompt,),
            tuple(Request(f"sample {at}", prompt, length) for at, length in enumerate(lengths)),
        )
