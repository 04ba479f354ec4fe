"""A Llama in plain torch; the caller supplies the attention."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn import functional as F

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, q [T, Hq, D], k [T, Hkv, D], v [T, Hkv, D]) to [T, Hq, D]."""


@dataclass(frozen=True)
class LlamaConfig:
    """The values of a model's ``config.json`` that the forward needs."""

    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    rope_theta: float
    max_tokens: int
    vocab_size: int
    eos: int

    @classmethod
    def read(cls, folder: Path) -> LlamaConfig:
        """Read ``config.json``.

        Raises
        ------
        ValueError
            If the model is not a plain Llama: another forward would be silently wrong.
        """
        given: dict[str, Any] = json.loads((folder / "config.json").read_text())
        rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
        for name, value, expected in (
            ("model_type", given["model_type"], "llama"),
            ("rope_type", rope.get("rope_type", "default"), "default"),
            ("hidden_act", given["hidden_act"], "silu"),
            ("attention_bias", given.get("attention_bias", False), False),
            ("mlp_bias", given.get("mlp_bias", False), False),
            ("tie_word_embeddings", given.get("tie_word_embeddings", False), False),
        ):
            if value != expected:
                raise ValueError(
                    f"{folder / 'config.json'}: {name} is {value!r}; expected {expected!r}, the "
                    "only kind of Llama that this engine runs"
                )
        return cls(
            num_layers=given["num_hidden_layers"],
            num_query_heads=given["num_attention_heads"],
            num_kv_heads=given["num_key_value_heads"],
            head_dim=given["head_dim"],
            eps=given["rms_norm_eps"],
            rope_theta=given["rope_theta"],
            max_tokens=given["max_position_embeddings"],
            vocab_size=given["vocab_size"],
            eos=given["eos_token_id"],
        )


class Llama:
    """RMSNorm, rotary positions, grouped-query attention, SwiGLU.

    Parameters
    ----------
    folder : Path
        The folder with ``config.json`` and ``model.safetensors``.
    dtype : torch.dtype
        Dtype of weights and activations.
    device : torch.device
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.config = config = LlamaConfig.read(folder)
        self.dtype, self.device = dtype, device
        stored = load_file(folder / "model.safetensors")
        self._weights = {name: weight.to(device, dtype) for name, weight in stored.items()}
        exponent = torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim
        position = torch.arange(config.max_tokens, device=device).float()
        angle = torch.outer(position, config.rope_theta**-exponent).repeat(1, 2)[:, None]
        self._cos, self._sin = angle.cos().to(dtype), angle.sin().to(dtype)  # [max_tokens, 1, D]

    @torch.inference_mode()
    def __call__(
        self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend
    ) -> torch.Tensor:
        """Final hidden states [T, hidden] of `tokens` [T] int64 at `positions` [T] int64."""
        config, eps = self.config, self.config.eps
        x = self._weights["model.embed_tokens.weight"][tokens]
        cos, sin = self._cos[positions], self._sin[positions]
        for layer in range(config.num_layers):
            h = F.rms_norm(x, x.shape[-1:], self._of(layer, "input_layernorm"), eps)
            q, k, v = (
                F.linear(h, self._of(layer, f"self_attn.{name}_proj")).view(
                    len(h), -1, config.head_dim
                )
                for name in "qkv"
            )
            out = attend(layer, _rotated(q, cos, sin), _rotated(k, cos, sin), v)
            x = x + F.linear(out.flatten(1), self._of(layer, "self_attn.o_proj"))
            h = F.rms_norm(x, x.shape[-1:], self._of(layer, "post_attention_layernorm"), eps)
            gate, up = (F.linear(h, self._of(layer, f"mlp.{name}_proj")) for name in ("gate", "up"))
            x = x + F.linear(F.silu(gate) * up, self._of(layer, "mlp.down_proj"))
        return F.rms_norm(x, x.shape[-1:], self._weights["model.norm.weight"], eps)

    @torch.inference_mode()
    def greedy(self, hidden: torch.Tensor) -> torch.Tensor:
        """The likeliest next token [T] int64 after each of `hidden` [T, hidden]."""
        return F.linear(hidden, self.output_weight).argmax(-1)

    @property
    def output_weight(self) -> torch.Tensor:
        """[vocabulary, hidden]: the last layer's weight."""
        return self._weights["lm_head.weight"]

    def _of(self, layer: int, name: str) -> torch.Tensor:
        return self._weights[f"model.layers.{layer}.{name}.weight"]


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
