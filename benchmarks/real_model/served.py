"""Answers of a trained model in two servers of a host, with tree attention and without.

The prompts are sections of the Python manual, each with several questions behind it, so requests
share real text. With n-gram drafts, the servers also tell how many tokens a verification gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.e2e.launch import ngram_arguments
from deft_backend.files.folders import state_directory
from deft_backend.settings.config import Settings
from deft_backend.tools.ab.comparison import compare
from deft_backend.tools.ab.sides import Progress, started_sides
from deft_backend.tools.harness.workload import Request, Workload

QUESTIONS = (
    "Summarise the section above in one sentence.", "Which names does the section define?",
    "Copy the first paragraph of the section.", "Give an example that follows the section.",
    "What raises an exception here, and which one?", "Repeat the last paragraph word for word.",
    "Explain the section to a beginner.", "List the rules of the section.",
)  # fmt: skip


def sections(text: str, count: int, characters: int, max_tokens: int) -> Workload:
    """`count` pieces of a text, and all of :data:`QUESTIONS` behind each of them."""
    step = len(text) // count
    pieces = [text[at * step : at * step + characters] for at in range(count)]
    return Workload(
        "manual",
        f"{len(QUESTIONS)} questions about each of {count} sections of {characters} characters",
        tuple(pieces),
        tuple(
            Request(f"section {number}, question {at}", f"{piece}\n\n{question}\n", max_tokens)
            for number, piece in enumerate(pieces)
            for at, question in enumerate(QUESTIONS)
        ),
    )


def answers(
    model: Path, host: str, workload: Workload, logs: Path, progress: Progress,
    *, drafts: int, control: bool = False, options: Sequence[str] = (),
) -> dict[str, Any]:  # fmt: skip
    """A row: how far both servers' answers agree, and the acceptance lengths of n-gram drafts.

    - `drafts`: the draft tokens of a verification; 0: the servers do not speculate.
    - `control`: start the host's own backend twice, to see how far it agrees with itself.

    Raises
    ------
    StartError, ServerError, AbError
        If a server does not start, does not answer, or decodes without tree attention.
    """
    speculation = ngram_arguments(host, drafts) if drafts else []
    sides = started_sides(
        str(model),
        host,
        logs,
        state_directory(Settings.from_env()),
        progress,
        policy=None,
        baseline=None,
        host_arguments=[*speculation, *options],
    )
    if control:
        sides = sides[0], replace(sides[0], name="host again")
    result = compare(sides, lambda offers: [workload], None, progress, exact=True)
    found = result.workloads[0].agreement
    return {
        "host": host, "drafts": drafts, "control": control, "answers": found.compared,
        "equal": found.equal, "tokens": found.tokens, "wrong": found.unexplained,
        "acceptance_length": {side.name: side.acceptance_length for side in result.sides},
    }  # fmt: skip
