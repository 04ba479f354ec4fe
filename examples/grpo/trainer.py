"""The trainer's side: its own log-probabilities of the samples, and a step of GRPO."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from examples.grpo.rollouts import Samples

CLIP = 0.2


class Trainer:
    """A causal language model of transformers; float32 weights, matrix products in `dtype`.

    GRPO: a sample's advantage is its reward, less the group's mean and over its deviation. No
    critic, and no penalty for the distance to a reference model.
    """

    def __init__(self, model: Path, dtype: torch.dtype, learning_rate: float, rows: int) -> None:
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()

        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._dtype = dtype
        self._rows = rows  # samples of a forward pass
        loaded: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self._model = loaded.to(self.device)
        # torch may run beside an older cuDNN, whose backward pass of attention fails.
        torch.backends.cuda.enable_cudnn_sdp(False)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), learning_rate)

    def step(self, prompt: Sequence[int], samples: Samples, rewards: torch.Tensor) -> torch.Tensor:
        """One step over a group; the log-probabilities [samples, tokens] before it."""
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        found = []
        for first in range(0, len(samples.ids), self._rows):
            part = slice(first, first + self._rows)
            logprobs = self._logprobs(prompt, samples.ids[part])
            drawn = torch.tensor(samples.logprobs[part], device=self.device)
            ratio = (logprobs - drawn).exp()
            advantage = advantages[part, None].to(self.device)
            gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
            loss = -gain.mean(1).sum() / len(samples.ids)
            torch.autograd.backward(loss)
            found.append(logprobs.detach().cpu())
        self._optimizer.step()
        self._optimizer.zero_grad()
        return torch.cat(found)

    def _logprobs(self, prompt: Sequence[int], ids: list[list[int]]) -> torch.Tensor:
        tokens = torch.tensor([[*prompt, *each] for each in ids], device=self.device)
        length = len(ids[0])
        mixed = self._dtype != torch.float32
        with torch.autocast(self.device.type, self._dtype, enabled=mixed):
            logits: torch.Tensor = self._model(tokens[:, :-1], logits_to_keep=length).logits
        scores = logits.float().log_softmax(-1)
        return scores.gather(-1, tokens[:, -length:, None])[..., 0]

    def save(self, folder: Path) -> None:
        """Write the weights in `dtype`, as a server loads them."""
        weights = {name: value.to(self._dtype) for name, value in self._model.state_dict().items()}
        self._model.save_pretrained(folder, state_dict=weights)
