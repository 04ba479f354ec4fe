"""Random weights for the checkpoint of measured servers.

The scale of the weights makes attention neither uniform nor one-hot. Answers then depend on every
part of the KV cache, and a wrong kernel changes tokens.

PyTorch keeps GPU memory until its process ends. So this module runs in its own process (``python -m
benchmarks.e2e.random_weights FOLDER``).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

SHARPNESS = 1.5
"""Standard deviation of the elements of q and k; the scores' is its square."""

LATER = 0.2
"""In a model that drafts for itself, what each layer behind the first adds is as much smaller. The
drafter repeats the first layer, so the model then accepts about half of the drafts."""


def write_weights(folder: Path) -> None:
    """Write random weights, one file per layer, and the index of the files.

    They are the same on all machines with the same kind of device. Uses a GPU if there is one;
    PyTorch then keeps gigabytes of its memory.

    - `folder`: holds the ``config.json`` with the model's shape.
    """
    import torch
    from safetensors.torch import save_file

    config = json.loads((folder / "config.json").read_text())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    hidden, inner, vocab = (
        config["hidden_size"],
        config["intermediate_size"],
        config["vocab_size"],
    )
    parts = _latent_parts(config) if "kv_lora_rank" in config else _parts(config)

    def normal(rows: int, columns: int, scale: float) -> torch.Tensor:
        weight = torch.randn(rows, columns, generator=generator, device=device)
        return (weight * scale).to(torch.bfloat16).cpu()

    blocks, norms = config.get("dflash_config"), {}
    if "kv_lora_rank" in config:
        norms = {"kv_a_layernorm": config["kv_lora_rank"]}
    elif blocks:
        norms = dict.fromkeys(("q_norm", "k_norm"), config["head_dim"])

    where: dict[str, str] = {}

    def save(tensors: dict[str, torch.Tensor], name: str, prefix: str = "") -> None:
        named = {prefix + tensor: value for tensor, value in tensors.items()}
        save_file(named, folder / name, metadata={"format": "pt"})
        where.update(dict.fromkeys(named, name))

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    unit = hidden**-0.5

    def block(added: float) -> dict[str, torch.Tensor]:
        """A layer; `added` scales what it adds to its input."""
        return {
            **{
                f"self_attn.{part}.weight": torch.cat(
                    [normal(rows, columns, scale * columns**-0.5) for rows, scale in blocks]
                )
                * (added if part == "o_proj" else 1.0)
                for part, (columns, blocks) in parts.items()
            },
            **{
                f"self_attn.{norm}.weight": torch.ones(size, dtype=torch.bfloat16)
                for norm, size in norms.items()
            },
            "mlp.gate_proj.weight": normal(inner, hidden, unit),
            "mlp.up_proj.weight": normal(inner, hidden, unit),
            "mlp.down_proj.weight": normal(hidden, inner, inner**-0.5) * added,
            "input_layernorm.weight": ones.clone(),
            "post_attention_layernorm.weight": ones.clone(),
        }

    layers, drafts = config["num_hidden_layers"], config.get("num_nextn_predict_layers")
    first: dict[str, torch.Tensor] = {}
    for layer in range(layers):
        made = block(LATER if drafts and layer else 1.0)
        first = first or made
        save(made, f"layer-{layer:02d}.safetensors", f"model.layers.{layer}.")
    embedding, head = normal(vocab, hidden, 1.0), normal(vocab, hidden, 3 * unit)
    save(
        {
            "model.embed_tokens.weight": embedding,
            "model.norm.weight": ones.clone(),
            "lm_head.weight": head,
        },
        "head.safetensors",
    )
    if blocks:  # drafted from the hidden states of some of the target's layers
        seen = len(blocks["target_layer_ids"]) * hidden
        projected = normal(hidden, seen, seen**-0.5)
        save({"fc.weight": projected, "hidden_norm.weight": ones.clone()}, "target.safetensors")
    if drafts:
        token_alone = torch.eye(hidden, 2 * hidden, dtype=torch.bfloat16)  # no hidden state
        save(
            {
                **first,
                "embed_tokens.weight": embedding,
                "shared_head.head.weight": head,
                "eh_proj.weight": token_alone,
                "enorm.weight": ones.clone(),
                "hnorm.weight": ones.clone(),
                "shared_head.norm.weight": ones.clone(),
            },
            "drafter.safetensors",
            f"model.layers.{layers}.",
        )
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


Parts = dict[str, tuple[int, list[tuple[int, float]]]]
"""Projections of an attention layer by name: columns, and blocks of rows with their scales."""


def _parts(config: dict[str, Any]) -> Parts:
    hidden, dim = config["hidden_size"], config["head_dim"]
    query, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    return {
        "q_proj": (hidden, [(query, SHARPNESS)]),
        "k_proj": (hidden, [(kv, SHARPNESS)]),
        "v_proj": (hidden, [(kv, 4.0)]),
        "o_proj": (query, [(hidden, 1.0)]),
    }


def _latent_parts(config: dict[str, Any]) -> Parts:
    """Of multi-head latent attention without a rank for queries."""
    hidden, heads, rank = (
        config["hidden_size"],
        config["num_attention_heads"],
        config["kv_lora_rank"],
    )
    nope, rope, value = (
        config["qk_nope_head_dim"],
        config["qk_rope_head_dim"],
        config["v_head_dim"],
    )
    return {
        "q_proj": (hidden, [(heads * (nope + rope), SHARPNESS)]),
        "kv_a_proj_with_mqa": (hidden, [(rank + rope, SHARPNESS)]),
        "kv_b_proj": (rank, [(nope, SHARPNESS), (value, 4.0)] * heads),
        "o_proj": (heads * value, [(hidden, 1.0)]),
    }


if __name__ == "__main__":
    write_weights(Path(sys.argv[1]))
