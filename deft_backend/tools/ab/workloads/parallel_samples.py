"""Parallel samples: one request with ``n`` answers, which fork from one prompt."""

from __future__ import annotations

from dataclasses import dataclass

from deft_backend.tools.ab.invented_text import passage, question
from deft_backend.tools.harness.request_plan import Request, RequestPlan, at_least_one


@dataclass(frozen=True)
class ParallelSamples:
    """`samples` answers to one prompt. They are greedy, so that all of them must be equal."""

    samples: int = 8
    prefix_characters: int = 600
    max_tokens: int = 24
    seed: int = 2

    def plan(self) -> RequestPlan:
        at_least_one(
            samples=self.samples,
            prefix_characters=self.prefix_characters,
            max_tokens=self.max_tokens,
        )
        notes = passage(self.prefix_characters, self.seed)
        prompt = notes + question(0, notes)
        return RequestPlan(
            "parallel-samples",
            f"one prompt of {len(prompt)} characters, n = {self.samples}",
            (prompt,),
            (Request("samples", prompt, self.max_tokens, n=self.samples),),
        )
