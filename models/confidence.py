"""Measure how well the tiny model knows its text, and how clearly it prefers its own tokens.

Tests compare greedy continuations token by token. This is valid only if the best token leads the
second best token by more than numerical noise, after short and long prompts.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from byte_tokens import ASSISTANT, EOS, encode_conversation
from checkpoint import load
from corpus import Writer
from rich.console import Console
from rich.table import Table
from sequences import HELD_OUT_SEED, write_sequence
from torch import nn
from torch.nn import functional

CONTINUATION_SIZE = 64
SEQUENCE_LENGTHS = (512, 2048, 6144)
RECALL_DISTANCES = (200, 1000, 2000, 4000)
CODES_ASKED = 24


@dataclass(frozen=True)
class Continuation:
    """Greedily chosen tokens and how far each one led the second best token."""

    tokens: list[int]
    margins: list[float]


@dataclass(frozen=True)
class Confidence:
    """The margins of the continuations of one kind of prompt, in units of the logits."""

    prompts: str
    count: int
    median: float
    first_percentile: float
    smallest: float
    same_in_float16: float
    same_in_bfloat16: float


@dataclass(frozen=True)
class Figures:
    """The results of an evaluation: losses by length, recalls by distance, in bytes."""

    bits_per_byte: dict[int, float]
    recalled_codes: dict[int, float]
    confidences: list[Confidence]


def evaluate(folder: Path, console: Console) -> Figures:
    """Measure the stored checkpoint."""
    exact = load(folder, torch.float32)
    half, brain = load(folder, torch.float16), load(folder, torch.bfloat16)
    confidences = []
    for name, prompts in held_out_prompts().items():
        with console.status(f"continuing {name}"):
            runs = [continue_greedily(exact, prompt) for prompt in prompts]
            same_in_float16 = share_continued_alike(half, prompts, runs)
            same_in_bfloat16 = share_continued_alike(brain, prompts, runs)
        margins = torch.tensor([margin for run in runs for margin in run.margins])
        confidences.append(
            Confidence(
                prompts=name,
                count=len(prompts),
                median=margins.median().item(),
                first_percentile=margins.quantile(0.01).item(),
                smallest=margins.min().item(),
                same_in_float16=same_in_float16,
                same_in_bfloat16=same_in_bfloat16,
            )
        )
    with console.status("measuring loss and recall"):
        return Figures(
            bits_per_byte={length: bits_per_byte(exact, length) for length in SEQUENCE_LENGTHS},
            recalled_codes={gap: recalled_share(exact, gap) for gap in RECALL_DISTANCES},
            confidences=confidences,
        )


def held_out_prompts() -> dict[str, list[list[int]]]:
    """Return prompts of each kind; texts stop anywhere, conversations before an answer."""
    chance = random.Random(HELD_OUT_SEED)
    seeds = iter(range(HELD_OUT_SEED, HELD_OUT_SEED + 10_000))
    texts = [
        list(Writer(next(seeds)).document(600).encode())[: chance.randrange(120, 600)]
        for _ in range(48)
    ]
    conversations = []
    for _ in range(32):
        tokens = encode_conversation(Writer(next(seeds)).conversation(chance.randrange(60, 600)))
        answers = [place for place, token in enumerate(tokens) if token == ASSISTANT]
        conversations.append(tokens[: answers[-1] + 1])
    long_texts = [
        list(Writer(next(seeds)).document(6200).encode())[: chance.randrange(2000, 6000)]
        for _ in range(24)
    ]
    texts_in_a_row = [
        list("\n\n".join(Writer(next(seeds)).document(500) for _ in range(count)).encode())
        for count in (4, 6, 8, 10, 4, 6, 8, 10)
    ]
    return {
        "texts of 120-600 bytes": texts,
        "conversations": conversations,
        "texts of 2,000-6,000 bytes": long_texts,
        "4-10 texts in a row, 2,000-6,000 bytes": texts_in_a_row,
    }


@torch.inference_mode()
def continue_greedily(model: nn.Module, prompt: Sequence[int]) -> Continuation:
    """Follow the best token for ``CONTINUATION_SIZE`` tokens, or up to the end of an answer."""
    tokens: list[int] = []
    margins: list[float] = []
    inputs, cache = torch.tensor([list(prompt)]), None
    while len(tokens) < CONTINUATION_SIZE and tokens[-1:] != [EOS]:
        output = model(input_ids=inputs, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = output.past_key_values
        logits: torch.Tensor = output.logits[0, -1].float()
        best, second = logits.topk(2).values.tolist()
        margins.append(best - second)
        tokens.append(int(logits.argmax()))
        inputs = torch.tensor([tokens[-1:]])
    return Continuation(tokens, margins)


def share_continued_alike(
    model: nn.Module, prompts: Sequence[Sequence[int]], runs: Sequence[Continuation]
) -> float:
    """Return the share of prompts that a model continues with the same tokens as given runs."""
    same = sum(
        continue_greedily(model, prompt).tokens == run.tokens
        for prompt, run in zip(prompts, runs, strict=True)
    )
    return same / len(prompts)


def next_token_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy, in nats, of every token given those before it."""
    logits: torch.Tensor = model(input_ids=batch[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())


@torch.inference_mode()
def bits_per_byte(model: nn.Module, length: int) -> float:
    """Return the loss on held-out sequences of a length."""
    rows = 65536 // length
    losses = []
    for row in range(rows):
        sequence = write_sequence(2 * HELD_OUT_SEED + row, length)
        losses.append(next_token_loss(model, torch.tensor([sequence])).item())
    return sum(losses) / rows / math.log(2)


def recalled_share(model: nn.Module, distance: int) -> float:
    """Return the share of codes given correctly ``distance`` bytes after they were named."""
    chance = random.Random(HELD_OUT_SEED + distance)
    seeds = iter(range(3 * HELD_OUT_SEED, 4 * HELD_OUT_SEED))
    recalled = 0
    for _ in range(CODES_ASKED):
        code = chance.randrange(1000, 10000)
        between = ""
        while len(between) < distance:
            text = Writer(next(seeds)).document(400)
            # A text that names the key itself would give a second answer.
            between += "" if "HARBOR" in text else f"{text}\n\n"
        prompt = f"The code of HARBOR is {code}.\n\n{between}What is the code of HARBOR?"
        expected = f" The code of HARBOR is {code}.".encode()
        continuation = continue_greedily(model, list(prompt.encode()))
        recalled += continuation.tokens[: len(expected)] == list(expected)
    return recalled / CODES_ASKED


def show(figures: Figures, console: Console) -> None:
    """Print the figures."""
    for length, bits in figures.bits_per_byte.items():
        console.print(f"held-out sequences of {length} bytes: {bits:.3f} bits per byte")
    for distance, share in figures.recalled_codes.items():
        console.print(f"codes recalled after {distance} bytes: {share:.0%}")
    table = Table("prompts", "count", "median", "1st percentile", "smallest", "float16", "bfloat16")
    for confidence in figures.confidences:
        table.add_row(*cells(confidence))
    console.print(table)


def cells(row: Confidence) -> tuple[str, ...]:
    """Return the row of a table that reports a confidence."""
    return (
        row.prompts,
        str(row.count),
        f"{row.median:.2f}",
        f"{row.first_percentile:.2f}",
        f"{row.smallest:.3f}",
        f"{row.same_in_float16:.0%}",
        f"{row.same_in_bfloat16:.0%}",
    )
