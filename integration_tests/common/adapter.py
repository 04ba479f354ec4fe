"""A LoRA adapter with random weights, just large enough to change the answers. With larger weights,
answers would depend on the rounding of each sum."""

import json

import torch
from safetensors.torch import save_file

RANK = 8


def write_adapter(folder, model, seed=5):
    """An adapter of rank 8 for the queries, keys and values of every layer of a checkpoint."""
    config = json.loads((model / "config.json").read_text())
    width, dim = config["hidden_size"], config["head_dim"]
    outputs = {
        "q_proj": config["num_attention_heads"] * dim,
        "k_proj": config["num_key_value_heads"] * dim,
        "v_proj": config["num_key_value_heads"] * dim,
    }
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for name, rows in outputs.items():
            base = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            down = torch.randn((RANK, width), generator=generator)
            weights[f"{base}.lora_A.weight"] = down / width**0.5
            weights[f"{base}.lora_B.weight"] = torch.randn((rows, RANK), generator=generator) * 0.3
    folder.mkdir(exist_ok=True)
    save_file(weights, str(folder / "adapter_model.safetensors"))
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": list(outputs),
        "lora_dropout": 0.0,
        "bias": "none",
        "base_model_name_or_path": model.name,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings))
