"""``python -m examples.grpo``, in a checkout: a table, and a record of the run."""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from benchmarks.row_files import make_folder, write_rows
from deft_backend.files.folders import cache_directory
from deft_backend.files.provenance import provenance
from deft_backend.tools.servers.command import StartError
from examples.grpo.checkpoint import make_checkpoint, packaged
from examples.grpo.rollouts import MODES, Mode, Rollouts, Samples, served
from examples.grpo.trainer import Trainer


def main(words: Sequence[str] | None = None) -> None:
    """Run the loop of each mode, one after another; all servers run from the start."""
    on_gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if on_gpu else torch.float32
    parser = argparse.ArgumentParser(
        prog="python -m examples.grpo", epilog="Arguments after -- go to the server."
    )
    parser.add_argument("--model", type=Path, help="a checkpoint; default: SmolLM2-135M-Instruct")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--samples", type=int, default=64, help="of a prompt, in each step")
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    parser.add_argument("--tokens", type=int, default=128, help="of a sample")
    parser.add_argument("--learning-rate", type=float, default=1e-5)
    parser.add_argument("--rows", type=int, default=8, help="samples of the trainer's forward pass")
    parser.add_argument("--out", type=Path, default=Path("reports/rollout-trust.json"))
    parser.add_argument("flags", nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if min(given.steps, given.samples - 1, given.prompt_tokens, given.tokens, given.rows) < 1:
        parser.error("expected at least 2 samples, and at least 1 of everything else")
    if "host-deterministic" in given.modes and not on_gpu:
        parser.error("SGLang's CPU engine has no deterministic mode; name other --modes")
    model = given.model or _smollm(dtype)
    make_folder(given.out)
    prompts = _prompts(model, given.steps, given.prompt_tokens)
    flags = {name: _flags(MODES[name], given) if on_gpu else given.flags for name in given.modes}
    sizes = {size: getattr(given, size) for size in ("steps", "samples", "tokens")}
    header = {**provenance(), **sizes, "prompt_tokens": given.prompt_tokens, "model": model.name}
    rows = []
    try:
        with served(model, flags, given.out.with_suffix("")) as servers:
            for name, rollouts in servers.items():
                torch.manual_seed(0)
                trainer = Trainer(model, dtype, given.learning_rate, given.rows)
                found = _run(rollouts, trainer, prompts, given)
                rows.append({"mode": name, "flags": flags[name], **found})
                write_rows(given.out, rows, header)
                Console().print(_table(rows))
                del trainer  # before the next one takes its memory
    except StartError as error:
        raise SystemExit(str(error)) from None


def _flags(mode: Mode, given: argparse.Namespace) -> list[str]:
    """Of a server that leaves the GPU's memory to the trainer and to other servers."""
    tokens = 4 * (given.prompt_tokens + given.samples * given.tokens)
    requests = ["--max-running-requests", str(given.samples), "--max-total-tokens", str(tokens)]
    flags = ["--dtype", "bfloat16", "--mem-fraction-static", "0.5", *requests]
    return [*flags, *["--enable-deterministic-inference"] * mode.deterministic, *given.flags]


def _run(
    rollouts: Rollouts, trainer: Trainer, prompts: list[list[int]], given: argparse.Namespace
) -> dict[str, Any]:
    """The steps of one mode; means over all of them, without the first step's time."""
    apart, rewards, seconds = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for step, prompt in enumerate(prompts):
            seeds = range(step * given.samples, (step + 1) * given.samples)
            samples = rollouts.sample(prompt, seeds, given.tokens)
            earned = _rewards(samples)
            logprobs = trainer.step(prompt, samples, earned)
            apart.append(logprobs - torch.tensor(samples.logprobs))
            rewards.append(float(earned.mean()))
            seconds.append(samples.seconds)
            trainer.save(Path(folder))
            rollouts.load(Path(folder))
    difference = torch.stack(apart).double()
    divergence = difference.exp() - 1 - difference  # of each token
    timed = seconds[1:] or seconds  # a server's first batch compiles and captures
    return {
        "mean_difference": float(difference.abs().mean()),
        "largest_difference": float(difference.abs().max()),
        "kl": float(divergence.mean()),
        "kl_error": float(divergence.std() / math.sqrt(divergence.numel())),  # a standard error
        "largest_by_step": [float(step.abs().max()) for step in apart],
        "generation_s": round(math.fsum(timed) / len(timed), 4),
        "rewards": [round(reward, 4) for reward in rewards],
    }


def _rewards(samples: Samples) -> torch.Tensor:
    """[samples] the share of different tokens in each sample: a reward that needs no judge."""
    return torch.tensor([len(set(ids)) / len(ids) for ids in samples.ids])


def _prompts(model: Path, count: int, tokens: int) -> list[list[int]]:
    """Sections of the Python manual."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = tokenizer.encode("\n".join(topics.values())).ids
    return [ids[at * tokens : (at + 1) * tokens] for at in range(count)]


def _smollm(dtype: torch.dtype) -> Path:
    kind = "bf16" if dtype == torch.bfloat16 else "fp32"
    return make_checkpoint(packaged(), cache_directory() / "models" / f"smollm2-135m-{kind}", dtype)


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Rollouts against the trainer: differences of log-probabilities")
    for column in ("mode", "mean", "largest", "KL", "s a step", "reward"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    for row in rows:
        numbers = (row["mean_difference"], row["largest_difference"], row["kl"])
        rewards = f"{row['rewards'][0]:.3f} → {row['rewards'][-1]:.3f}"
        shown = (f"{number:.2e}" for number in numbers)
        table.add_row(row["mode"], *shown, f"{row['generation_s']:.2f}", rewards)
    return table


if __name__ == "__main__":
    main()
