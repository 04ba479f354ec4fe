"""Measure how many draft tokens the tiny model accepts, as greedy speculation counts them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from checkpoint import load
from confidence import continue_greedily, held_out_prompts
from rich.console import Console
from torch import nn

DRAFT_TOKENS = 4
"""Draft tokens of a verification."""

KINDS = ("texts of 120-600 bytes", "conversations")
"""The held-out prompts to continue."""


@torch.inference_mode()
def agreements(draft: nn.Module, prompt: Sequence[int], tokens: Sequence[int]) -> list[bool]:
    """Return for each token of a continuation whether the draft model's best token is the same."""
    logits = draft(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0]
    best = logits[len(prompt) - 1 : -1].argmax(dim=-1).tolist()
    return [guess == token for guess, token in zip(best, tokens, strict=True)]


def accepted_share(runs: Sequence[Sequence[bool]]) -> float:
    """Return accepted draft tokens per draft token, in chains of ``DRAFT_TOKENS``.

    A draft token follows the draft model's own tokens. It counts only if the tokens before it were
    accepted, so it follows the same text as in `runs`. Each verification also gives one token of
    the target itself.
    """
    drafted = accepted = 0
    for run in runs:
        place = 0
        while place + DRAFT_TOKENS <= len(run):
            chain = run[place : place + DRAFT_TOKENS]
            taken = chain.index(False) if False in chain else DRAFT_TOKENS
            drafted += DRAFT_TOKENS
            accepted += taken
            place += taken + 1
    return accepted / drafted


def measure_acceptance(target: Path, draft: Path, console: Console) -> dict[str, float]:
    """Return the accepted share for each kind of held-out prompt, and print it."""
    exact, guesser = load(target, torch.float32), load(draft, torch.float32)
    shares = {}
    for name in KINDS:
        prompts = held_out_prompts()[name]
        with console.status(f"continuing {name}"):
            runs = [
                agreements(guesser, prompt, continue_greedily(exact, prompt).tokens)
                for prompt in prompts
            ]
        shares[name] = accepted_share(runs)
        console.print(f"{name}: {shares[name]:.0%} of the draft tokens are accepted")
    return shares
