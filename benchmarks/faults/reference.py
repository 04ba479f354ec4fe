"""Right answers: the tiny model in float32, run by transformers, without a server."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

Ids = tuple[int, ...]


def draw_prompts(seed: int, count: int, shared: int, own: int, vocabulary: int = 256) -> list[Ids]:
    """Prompts of random tokens that share a prefix, each with a tail of its own."""
    choose = random.Random(seed)
    prefix = tuple(choose.randrange(vocabulary) for _ in range(shared))
    return [
        prefix + tuple(choose.randrange(vocabulary) for _ in range(choose.randint(1, own)))
        for _ in range(count)
    ]


class Reference:
    """Greedy answers of a checkpoint; each is computed once."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)  # a tiny model: threads wait for each other, and for the servers
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._known: dict[tuple[Ids, int], list[int]] = {}

    def answers(self, prompts: Sequence[Ids], tokens: int) -> list[list[int]]:
        """The greedy answer of each prompt, `tokens` long."""
        return [self._answer(prompt, tokens) for prompt in prompts]

    def _answer(self, prompt: Ids, tokens: int) -> list[int]:
        if (prompt, tokens) not in self._known:
            ids = self._torch.tensor([prompt])
            found: list[int] = []
            cache = None
            with self._torch.inference_mode():
                while len(found) < tokens:
                    result = self._model(ids, past_key_values=cache, use_cache=True)
                    cache = result.past_key_values
                    found.append(int(result.logits[0, -1].argmax()))
                    ids = self._torch.tensor([[found[-1]]])
            self._known[prompt, tokens] = found
        return self._known[prompt, tokens]
