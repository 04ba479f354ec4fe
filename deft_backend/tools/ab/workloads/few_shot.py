"""Few-shot prompting: many questions behind one prompt of notes (DeFT, section 4.1)."""

from __future__ import annotations

from dataclasses import dataclass

from deft_backend.tools.ab.invented_text import passage, question
from deft_backend.tools.harness.request_plan import Request, RequestPlan, at_least_one


@dataclass(frozen=True)
class FewShot:
    """`branches` questions behind one prompt of `prefix_characters` characters."""

    branches: int = 8
    prefix_characters: int = 600
    max_tokens: int = 24
    seed: int = 1

    def plan(self) -> RequestPlan:
        at_least_one(
            branches=self.branches,
            prefix_characters=self.prefix_characters,
            max_tokens=self.max_tokens,
        )
        prompt = passage(self.prefix_characters, self.seed)
        return RequestPlan(
            "few-shot",
            f"{self.branches} questions behind one prompt of {self.prefix_characters} characters",
            (prompt,),
            tuple(
                Request(f"branch {i}", prompt + question(i, prompt), self.max_tokens)
                for i in range(self.branches)
            ),
        )
