"""Random weights for the checkpoint of measured servers.

The scale of the weights makes attention neither uniform nor one-hot. Answers then depend on every
part of the KV cache, and a wrong kernel changes tokens.

PyTorch keeps GPU memory until its process ends. So this module runs in its own process (``python -m
benchmarks.e2e.random_weights FOLDER SEED``).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

SHARPNESS = 1.5
"""Standard deviation of the elements of q and k; the scores' is its square."""


def write_weights(folder: Path, seed: int) -> None:
    """Write random weights, one file per layer, and the index of the files.

    Uses a GPU if there is one; PyTorch then keeps gigabytes of its memory.

    Parameters
    ----------
    folder : Path
        Holds the ``config.json`` with the model's shape.
    seed : int
        Seed of the weights. They are the same on all machines with the same kind of device.
    """
    import torch
    from safetensors.torch import save_file

    config = json.loads((folder / "config.json").read_text())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(seed)
    hidden, inner, vocab = (
        config["hidden_size"], config["intermediate_size"], config["vocab_size"],
    )  # fmt: skip
    query = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]

    def normal(rows: int, columns: int, scale: float) -> torch.Tensor:
        weight = torch.randn(rows, columns, generator=generator, device=device)
        return (weight * scale).to(torch.bfloat16).cpu()

    where: dict[str, str] = {}

    def save(tensors: dict[str, torch.Tensor], name: str) -> None:
        save_file(tensors, folder / name, metadata={"format": "pt"})
        where.update(dict.fromkeys(tensors, name))

    ones = torch.ones(hidden, dtype=torch.bfloat16)
    unit = hidden**-0.5
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}."
        save(
            {
                name + "self_attn.q_proj.weight": normal(query, hidden, SHARPNESS * unit),
                name + "self_attn.k_proj.weight": normal(kv, hidden, SHARPNESS * unit),
                name + "self_attn.v_proj.weight": normal(kv, hidden, 4 * unit),
                name + "self_attn.o_proj.weight": normal(hidden, query, query**-0.5),
                name + "mlp.gate_proj.weight": normal(inner, hidden, unit),
                name + "mlp.up_proj.weight": normal(inner, hidden, unit),
                name + "mlp.down_proj.weight": normal(hidden, inner, inner**-0.5),
                name + "input_layernorm.weight": ones.clone(),
                name + "post_attention_layernorm.weight": ones.clone(),
            },
            f"layer-{layer:02d}.safetensors",
        )
    save(
        {
            "model.embed_tokens.weight": normal(vocab, hidden, 1.0),
            "model.norm.weight": ones.clone(),
            "lm_head.weight": normal(vocab, hidden, 3 * unit),
        },
        "head.safetensors",
    )
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


if __name__ == "__main__":
    write_weights(Path(sys.argv[1]), int(sys.argv[2]))
