"""Make or measure the tiny Llama checkpoint that the demo and the integration tests serve, or its
draft model.

Training starts from random weights and invented text (see ``corpus.py``). So it needs no download,
and the seed decides the result. Training needs torch 2.9 or newer, for Muon.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from acceptance import measure_acceptance
from byte_tokens import VOCABULARY_SIZE, build_tokenizer
from checkpoint import (
    ARCHITECTURE,
    DRAFT_ARCHITECTURE,
    WEIGHTS_FILE,
    load,
    new_model,
    save,
)
from confidence import (
    continue_greedily,
    evaluate,
    held_out_prompts,
    next_token_loss,
    share_continued_alike,
    show,
)
from draft_card import write_draft_card
from model_card import write_model_card
from rich.console import Console
from rich.progress import Progress
from sequences import HELD_OUT_SEED, write_sequence
from torch import nn

TARGET_FOLDER = Path(__file__).parent / "tiny-llama"
DRAFT_FOLDER = Path(__file__).parent / "tiny-draft"


@dataclass(frozen=True)
class Stage:
    """A stretch of training: batches of ``batch_tokens``, each of one of the ``lengths``."""

    steps: int
    batch_tokens: int
    lengths: tuple[int, ...]


# Short sequences first: the model learns to spell and to copy cheaply before it has to look
# back far. The last stage reaches the lengths at which the integration tests prompt.
STAGES = (
    Stage(steps=700, batch_tokens=4096, lengths=(512,)),
    Stage(steps=340, batch_tokens=8192, lengths=(512, 1024, 2048)),
    Stage(steps=70, batch_tokens=12288, lengths=(2048, 6144)),
)
# The target accepts enough drafts after two thirds of a run, so its training stops there.
DRAFT_STAGES = (Stage(steps=603, batch_tokens=4096, lengths=(512,)),)
DRAFT_SCHEDULE = 900
"""Steps over which the draft's learning rate would fall to nearly nothing."""


def steps_of(stages: Sequence[Stage]) -> int:
    """Return the steps of all stages."""
    return sum(stage.steps for stage in stages)


def tokens_of(stages: Sequence[Stage]) -> int:
    """Return the tokens of all stages."""
    return sum(stage.steps * stage.batch_tokens for stage in stages)


app = typer.Typer(add_completion=False)
console = Console()


def write_batches(seed: int, stages: Sequence[Stage]) -> Iterator[torch.Tensor]:
    """Yield the training batches of all stages, in order."""
    chance = random.Random(seed)
    for stage in stages:
        for _ in range(stage.steps):
            length = chance.choice(stage.lengths)
            rows = stage.batch_tokens // length
            seeds = [chance.randrange(HELD_OUT_SEED) for _ in range(rows)]
            yield torch.tensor([write_sequence(row_seed, length) for row_seed in seeds])


def learning_rate_share(progress: float) -> float:
    """Return the share of the peak rate: warm up, hold, then fall to nearly nothing."""
    return min(1.0, 0.1 + progress / 0.03, 0.02 + 1.6 * (1.0 - progress))


def train(
    seed: int, architecture: dict[str, Any], stages: Sequence[Stage], schedule: int
) -> nn.Module:
    """Train a model from random weights; the learning rate falls over `schedule` steps."""
    torch.manual_seed(seed)
    model = new_model(architecture).train()
    steps = steps_of(stages)
    # Muon learns the matrices in far fewer steps than Adam does; embeddings and norms are not
    # matrices in its sense.
    matrices: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, weight in model.named_parameters():
        (matrices if weight.ndim == 2 and ".layers." in name else others).append(weight)
    optimizers: tuple[torch.optim.Optimizer, ...] = (
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.05),
        torch.optim.AdamW(others, lr=4e-3, betas=(0.9, 0.98), weight_decay=0.0),
    )
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: learning_rate_share(step / schedule)
        )
        for optimizer in optimizers
    ]
    recent_loss, started = math.log(VOCABULARY_SIZE), time.monotonic()
    with Progress(console=console) as progress:
        bar = progress.add_task("training", total=steps)
        for step, batch in enumerate(write_batches(seed, stages), start=1):
            loss = next_token_loss(model, batch)
            torch.autograd.backward(loss)
            nn.utils.clip_grad_norm_(others, 1.0)
            for optimizer, schedule in zip(optimizers, schedules, strict=True):
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            recent_loss += 0.05 * (loss.item() - recent_loss)
            progress.update(bar, advance=1)
            if step % 50 == 0 or step == steps:
                progress.console.print(
                    f"step {step}/{steps}: {recent_loss / math.log(2):.3f} bits per byte, "
                    f"{(time.monotonic() - started) / 60:.1f} minutes"
                )
    return model.eval()


def report_rounding(model: nn.Module, folder: Path) -> None:
    """Print how many greedy continuations survive the rounding of the weights to float16."""
    prompts = [prompt for group in held_out_prompts().values() for prompt in group]
    runs = [continue_greedily(model, prompt) for prompt in prompts]
    share = share_continued_alike(load(folder, torch.float32), prompts, runs)
    console.print(f"{share:.1%} of {len(prompts)} continuations are the same after rounding")


def print_samples(folder: Path) -> None:
    """Print a few continuations after the ends of their prompts, to be read."""
    model, tokenizer = load(folder, torch.float32), build_tokenizer()
    for prompts in held_out_prompts().values():
        for prompt in prompts[:4]:
            tokens = continue_greedily(model, prompt).tokens
            for part, style in ((prompt[-160:], "dim"), (tokens, "bold green")):
                text = tokenizer.decode(part, skip_special_tokens=False)
                console.print(text, style=style, end="", markup=False, highlight=False)
            console.rule()


def at_least(minimum: int) -> Callable[[int], int]:
    """Return a check of an option that names the value it refuses."""

    def check(value: int) -> int:
        if value < minimum:
            raise typer.BadParameter(f"{value} is too small; give {minimum} or more.")
        return value

    return check


@app.command()
def main(
    folder: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the checkpoint; default: tiny-llama or tiny-draft, beside this script",
            file_okay=False,
        ),
    ] = None,
    draft: Annotated[
        bool, typer.Option("--draft", help="The draft model for the tiny Llama, not itself.")
    ] = False,
    evaluate_only: Annotated[
        bool, typer.Option("--evaluate", help="Measure the stored checkpoint; do not train.")
    ] = False,
    samples: Annotated[
        bool, typer.Option("--samples", help="Also print a few continuations.")
    ] = False,
    seed: Annotated[int, typer.Option(callback=at_least(0), help="Seed of text and weights.")] = 0,
    threads: Annotated[
        int, typer.Option(callback=at_least(1), help="CPU threads to compute with.")
    ] = 2,
) -> None:
    """Train the tiny Llama or its draft model from scratch and measure it, or only measure it.

    Every run rewrites the README of the checkpoint with what was measured.
    """
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    folder = folder or (DRAFT_FOLDER if draft else TARGET_FOLDER)
    architecture = DRAFT_ARCHITECTURE if draft else ARCHITECTURE
    stages = DRAFT_STAGES if draft else STAGES
    if not evaluate_only:
        model = train(seed, architecture, stages, DRAFT_SCHEDULE if draft else steps_of(stages))
        save(model, folder, architecture)
        report_rounding(model, folder)
    elif not (folder / WEIGHTS_FILE).is_file():
        raise typer.BadParameter(
            f"'{folder}' holds no {WEIGHTS_FILE}; name the folder of a checkpoint.",
            param_hint="--folder",
        )
    if draft:
        accepted = measure_acceptance(TARGET_FOLDER, folder, console)
        write_draft_card(folder, accepted, steps=steps_of(stages), tokens=tokens_of(stages))
        return
    figures = evaluate(folder, console)
    show(figures, console)
    write_model_card(
        folder,
        figures,
        steps=steps_of(stages),
        tokens=tokens_of(stages),
        lengths=tuple(length for stage in stages for length in stage.lengths),
    )
    if samples:
        print_samples(folder)


if __name__ == "__main__":
    app()
