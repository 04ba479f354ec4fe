"""Sampled answers, checked token by token against a model in plain PyTorch.

PyTorch keeps GPU memory until its process ends. So the check runs in its own process, after the
server has ended (``python -m benchmarks.plain_answers MODEL SAMPLES ARITHMETIC``).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.e2e.checked_answers import Checked, OtherToken, Sample, load_samples
from benchmarks.e2e.plain_check import Names
from benchmarks.plain_llama import Arithmetic, PlainLlama

NOISE = 1e-3
"""In float32, the order of a sum decides between log-probabilities closer than this."""


def check(samples: Sequence[Sample], model: str, names: Names, tolerance: float) -> Checked:
    """Check each token of each answer; those before it are taken as they are."""
    arithmetic = Arithmetic(
        getattr(torch, names.dtype), getattr(torch, names.cache), names.coarse_prompts
    )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    llama = PlainLlama(Path(model), arithmetic, device)
    found = Checked()
    # Neighbours share most of their prompts, whose keys and values are computed once.
    for number, (prompt, answer) in sorted(enumerate(samples), key=lambda sample: sample[1][0]):
        scores = llama.log_probs(prompt, answer).cpu()
        best = scores.argmax(-1).tolist()
        found.answers += 1
        found.tokens += len(answer)
        for at, (ours, theirs) in enumerate(zip(answer, best, strict=True)):
            if ours == theirs:
                continue
            other = OtherToken(
                f"answer {number} ({len(prompt)} tokens before), token {at}: {ours} instead of "
                f"{theirs}",
                (*prompt, *answer[:at]), ours,
            )  # fmt: skip
            found.judge(other, float(scores[at, theirs] - scores[at, ours]), tolerance)
    return found


if __name__ == "__main__":
    tolerance, *found = json.loads(sys.argv[3])
    tie = max(NOISE, tolerance)
    result = check(load_samples(Path(sys.argv[2])), sys.argv[1], Names(*found), tie)
    print(json.dumps(result.to_dict(tie)))
