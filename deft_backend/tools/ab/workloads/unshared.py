"""Unshared traffic, the control: tree attention can gain nothing here and must lose nothing."""

from __future__ import annotations

from dataclasses import dataclass

from deft_backend.tools.ab.invented_text import passage, question
from deft_backend.tools.harness.request_plan import Request, RequestPlan, at_least_one


@dataclass(frozen=True)
class Unshared:
    """`requests` prompts that differ from their first character on."""

    requests: int = 8
    prompt_characters: int = 300
    max_tokens: int = 24
    seed: int = 5

    def plan(self) -> RequestPlan:
        at_least_one(
            requests=self.requests,
            prompt_characters=self.prompt_characters,
            max_tokens=self.max_tokens,
        )
        notes = [
            passage(self.prompt_characters, self.seed * 1000 + i) for i in range(self.requests)
        ]
        return RequestPlan(
            "unshared",
            f"{self.requests} prompts of {self.prompt_characters} characters, all different",
            (),
            tuple(
                Request(f"request {i}", f"{i + 1}. {text}{question(0, text)}", self.max_tokens)
                for i, text in enumerate(notes)
            ),
        )
