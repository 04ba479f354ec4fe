"""Greedy answers of the model itself, in float32 and without a server: a second reference."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from integration_tests.common.server import Answer, Ask


class PlainModel:
    """Answers like `Reference`, from a checkpoint's folder. Servers must run in float32."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        torch.set_num_threads(1)  # servers need the other cores
        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder).float().eval()
        self._known: dict[tuple[str, int], Answer] = {}

    def answers(self, asks: Sequence[Ask]) -> list[list[Answer]]:
        return [self._choices(ask.body()) for ask in asks]

    def _choices(self, body: dict[str, Any]) -> list[Answer]:
        assert body["temperature"] == 0, "only greedy answers have a reference"
        prompts = [body["prompt"]] if isinstance(body["prompt"], str) else body["prompt"]
        return [self._answer(p, body["max_tokens"]) for p in prompts for _ in range(body["n"])]

    def _answer(self, prompt: str, tokens: int) -> Answer:
        if (prompt, tokens) not in self._known:
            self._known[prompt, tokens] = self._decode(prompt, tokens)
        return self._known[prompt, tokens]

    @torch.no_grad()
    def _decode(self, prompt: str, tokens: int) -> Answer:
        ids: list[int] = []
        logprobs: list[float] = []
        rows = torch.tensor([self._tokenizer(prompt)["input_ids"]])
        cache = None
        for _ in range(tokens):
            out = self._model(rows, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logprob, token = out.logits[0, -1].log_softmax(-1).max(-1)
            ids.append(int(token))
            logprobs.append(float(logprob))
            rows = token.reshape(1, 1)
        texts = tuple(self._tokenizer.decode([token]) for token in ids)
        text = self._tokenizer.decode(ids, skip_special_tokens=True)
        likeliest = tuple({t: p} for t, p in zip(texts, logprobs, strict=True))
        return Answer(text, "length", texts, tuple(logprobs), likeliest)
