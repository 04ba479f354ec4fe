"""Document questions: several about each of several documents, with two levels of sharing."""

from __future__ import annotations

from dataclasses import dataclass

from deft_backend.tools.ab.invented_text import passage, question
from deft_backend.tools.harness.request_plan import Request, RequestPlan, at_least_one

_INSTRUCTION = "Answer from the notes.\n\n"


@dataclass(frozen=True)
class DocumentQuestions:
    """`questions` questions about each of `documents` documents, behind one instruction."""

    documents: int = 2
    questions: int = 4
    prefix_characters: int = 400
    max_tokens: int = 24
    seed: int = 3

    def plan(self) -> RequestPlan:
        at_least_one(
            documents=self.documents,
            questions=self.questions,
            prefix_characters=self.prefix_characters,
            max_tokens=self.max_tokens,
        )
        seeds = [self.seed * 1000 + d for d in range(self.documents)]
        texts = [_INSTRUCTION + passage(self.prefix_characters, seed) for seed in seeds]
        return RequestPlan(
            "document-questions",
            f"{self.questions} questions about each of {self.documents} documents "
            f"of {self.prefix_characters} characters",
            tuple(texts),
            tuple(  # the documents take turns, as in real traffic
                Request(f"document {d} question {q}", text + question(q, text), self.max_tokens)
                for q in range(self.questions)
                for d, text in enumerate(texts)
            ),
        )
