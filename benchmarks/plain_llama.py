"""A Llama in plain PyTorch, which computes as the server's host does, rounding included.

It shares no kernel with a host or with the plugin. Products and sums are in float32. What a host
keeps in its own dtype is rounded to that dtype: activations, keys and values.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

QUERIES_AT_ONCE = 256
"""Queries whose scores are in memory together."""

TOKENS_AT_ONCE = 2048
"""Tokens of a prompt that go through a layer together."""

WEIGHT_RANGE = 256.0
"""FlashAttention-3 scales softmax weights to at most this before it rounds them to 8 bits."""


class Arithmetic(NamedTuple):
    """How the server computes.

    Attributes
    ----------
    dtype : torch.dtype
        Of activations.
    cache : torch.dtype
        Of cached keys and values.
    coarse_prompts : bool
        Whether the prompts' attention also rounds queries and softmax weights to the cache's 8
        bits, as FlashAttention-3 does. Answers are computed without this rounding.
    """

    dtype: torch.dtype
    cache: torch.dtype
    coarse_prompts: bool


class PlainLlama:
    """A checkpoint folder's model.

    Parameters
    ----------
    folder : Path
        A Llama that :func:`~benchmarks.e2e.served_model.write_model` wrote.
    arithmetic : Arithmetic
    device : torch.device
    """

    def __init__(self, folder: Path, arithmetic: Arithmetic, device: torch.device) -> None:
        from safetensors.torch import load_file

        self._config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        self._arithmetic, self._device = arithmetic, device
        self._weights = {
            name: tensor.to(device, torch.float32)
            for file in sorted(folder.glob("*.safetensors"))
            for name, tensor in load_file(file).items()
        }
        half = (
            torch.arange(0, self._config["head_dim"], 2, device=device) / self._config["head_dim"]
        )
        self._frequency = self._config["rope_theta"] ** -half
        self._held: tuple[int, ...] = ()
        self._keys_values: list[tuple[torch.Tensor, torch.Tensor]] = []

    @torch.no_grad()
    def log_probs(self, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """Log-probabilities [answer tokens, vocabulary] float32 of each token of an answer.

        The model keeps the prompt's keys and values, and begins where the next prompt differs.
        """
        kept = 0
        for ours, theirs in zip(self._held, prompt[:-1], strict=False):
            if ours != theirs:
                break
            kept += 1
        hidden = torch.empty(0)
        for at in range(kept, len(prompt), TOKENS_AT_ONCE):
            part = prompt[at : at + TOKENS_AT_ONCE]
            hidden, self._keys_values = self._extend(part, at, self._arithmetic.coarse_prompts)
        self._held = tuple(prompt)
        rows = [hidden[-1:]]
        if len(answer) > 1:
            rows.append(self._extend(answer[:-1], len(prompt), coarse=False)[0])
        scores = self._norm(torch.cat(rows), "model.norm") @ self._weights["lm_head.weight"].T
        return scores.log_softmax(-1)

    def _extend(
        self, ids: Sequence[int], start: int, coarse: bool
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """The last layer's output for tokens behind `start` held ones, and all keys and values."""
        token = torch.tensor(ids, device=self._device)
        hidden = self._weights["model.embed_tokens.weight"][token]
        found = []
        for layer in range(self._config["num_hidden_layers"]):
            name = f"model.layers.{layer}."
            given = self._norm(hidden, name + "input_layernorm")
            q, k, v = self._heads(given, name, start)
            if self._keys_values:
                held_k, held_v = self._keys_values[layer]
                k, v = torch.cat([held_k[:start], k]), torch.cat([held_v[:start], v])
            found.append((k, v))
            attended = self._round(self._attend(q, k, v, start, coarse)).flatten(1)
            hidden = self._round(hidden + self._linear(attended, name + "self_attn.o_proj"))
            given = self._norm(hidden, name + "post_attention_layernorm")
            gate = torch.nn.functional.silu(self._linear(given, name + "mlp.gate_proj"))
            inner = self._round(gate * self._linear(given, name + "mlp.up_proj"))
            hidden = self._round(hidden + self._linear(inner, name + "mlp.down_proj"))
        return hidden, found

    def _heads(
        self, given: torch.Tensor, name: str, start: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries [tokens, Hq, D], and keys and values [tokens, Hkv, D] as the cache holds them."""
        q, k, v = (
            self._linear(given, f"{name}self_attn.{which}_proj").view(
                len(given), -1, self._config["head_dim"]
            )
            for which in "qkv"
        )
        cache = self._arithmetic.cache
        q, k = self._rotated(q, start), self._rotated(k, start)
        return q, k.to(cache).float(), v.to(cache).float()

    def _attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, coarse: bool
    ) -> torch.Tensor:
        """Causal attention [tokens, Hq, D] of queries that stand at `start` and behind it."""
        out = torch.empty_like(q)
        heads, cache = k.shape[1], self._arithmetic.cache
        if coarse:
            q = q.to(cache).float()
        q = q.view(len(q), heads, -1, q.shape[-1]) * q.shape[-1] ** -0.5
        for at in range(0, len(q), QUERIES_AT_ONCE):
            some = q[at : at + QUERIES_AT_ONCE]
            stop = start + at + len(some)
            place = torch.arange(stop, device=q.device)
            hidden = place[None] > place[start + at :, None]
            scores = torch.einsum("nhgd,mhd->hgnm", some, k[:stop])
            scores.masked_fill_(hidden, float("-inf"))
            weights = (scores - scores.amax(-1, keepdim=True)).exp_()
            total = weights.sum(-1)
            if coarse:
                weights = (weights * WEIGHT_RANGE).to(cache).float() / WEIGHT_RANGE
            summed = torch.einsum("hgnm,mhd->nhgd", weights, v[:stop])
            out[at : at + len(some)] = (summed / total.permute(2, 0, 1)[..., None]).flatten(1, 2)
        return out

    def _rotated(self, x: torch.Tensor, start: int) -> torch.Tensor:
        """With rotary position embeddings; the two halves of a head are pairs."""
        place = torch.arange(start, start + len(x), device=x.device)
        angle = place[:, None, None] * self._frequency
        left, right = x.chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return self._round(torch.cat([left * cos - right * sin, right * cos + left * sin], -1))

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self._config["rms_norm_eps"])
        return self._round(x * scale * self._weights[name + ".weight"])

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self._round(x @ self._weights[name + ".weight"].T)

    def _round(self, x: torch.Tensor) -> torch.Tensor:
        return x.to(self._arithmetic.dtype).float()
