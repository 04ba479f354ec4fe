"""A model to serve that needs nothing but this machine: a written shape, weights and tokenizer.

Random weights are scaled so that attention is neither uniform nor one-hot: answers then depend on
every part of the KV cache, and a wrong kernel shows in the tokens. Dummy weights (the host fills
them in) start sooner and take no space on disk, but are so small that attention never reaches the
logits: with them only times can be compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
"""The published shape of Llama-3.1-8B."""

ONE_LAYER: dict[str, Any] = {
    **LLAMA_8B, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1,
    "vocab_size": 1024, "bos_token_id": 1022, "eos_token_id": 1023,
}  # fmt: skip
"""So little work for a GPU that a decode step takes as long as the host's scheduler needs."""

TINY: dict[str, Any] = {
    **LLAMA_8B, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1024,
    "bos_token_id": 1022, "eos_token_id": 1023, "max_position_embeddings": 16384,
}  # fmt: skip
"""For a machine without a GPU."""

SHAPES: Mapping[str, dict[str, Any]] = {
    "llama-3.1-8b": LLAMA_8B, "one-layer": ONE_LAYER, "tiny": TINY,
}  # fmt: skip
WEIGHTS = ("random", "dummy")

SHARPNESS = 1.5
"""Standard deviation of q and k elements: scores spread by its square."""


class ModelError(ValueError):
    """A checkpoint folder that cannot be served with token ids."""


@dataclass(frozen=True)
class Model:
    """What is served.

    Attributes
    ----------
    path : str
        Folder of the checkpoint.
    name : str
        As rows name it.
    ids : int
        Prompts are made of the token ids below this one; special tokens lie above.
    context : int
        Positions that the model takes.
    load_format : str, optional
        The host's ``--load-format``; None leaves it to the host.
    """

    path: str
    name: str
    ids: int
    context: int
    load_format: str | None = None


def write_model(folder: Path, shape: str, weights: str, served: str, seed: int = 0) -> Model:
    """Write a checkpoint of `shape` with a tokenizer of as many words as the model has tokens.

    Parameters
    ----------
    folder : Path
        Is created.
    shape, weights : str
        One of :data:`SHAPES` and of :data:`WEIGHTS`.
    served : str
        Dtype in which servers will run it, for its name.
    seed : int
        Of the random weights, which are the same on every machine of one kind of device.
    """
    config = SHAPES[shape]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, config["vocab_size"])
    if weights == "random":
        _write_weights(folder, config, seed)
    return written_model(folder, shape, weights, served)


def written_model(folder: Path, shape: str, weights: str, served: str) -> Model:
    """What :func:`write_model` wrote before."""
    config = SHAPES[shape]
    return Model(
        str(folder), f"{shape}, {weights} weights, {served}",
        config["bos_token_id"], config["max_position_embeddings"],
        "dummy" if weights == "dummy" else None,
    )  # fmt: skip


def read_model(path: str) -> Model:
    """A checkpoint folder of the user's own.

    Raises
    ------
    ModelError
        If it holds no ``config.json`` that names its vocabulary.
    """
    try:
        config = json.loads((Path(path) / "config.json").read_text())
        vocabulary, context = int(config["vocab_size"]), int(config["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"{path} cannot be read as a checkpoint ({error!r}); expected a folder whose "
            "config.json has vocab_size and max_position_embeddings"
        ) from error
    special: list[int] = []
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        value = config.get(name)
        special += value if isinstance(value, list) else [value] if value is not None else []
    return Model(path, Path(path).name, min([vocabulary, *(i for i in special if i)]), context)


def write_tokenizer(folder: Path, words: int) -> None:
    """A tokenizer of the words ``w0``, ``w1``, … with ids 0, 1, …, separated by spaces.

    The hosts' own clients make prompts as text, from ids drawn at random: what they decode has to
    come back as the same ids, or prompts are not as long as was asked for.
    """
    content: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [],
        "normalizer": None, "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None, "decoder": None,
        "model": {
            "type": "WordLevel", "vocab": {f"w{i}": i for i in range(words)}, "unk_token": "w0",
        },
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(content))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
        "bos_token": f"w{words - 2}", "eos_token": f"w{words - 1}", "add_bos_token": False,
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def _write_weights(folder: Path, config: Mapping[str, Any], seed: int) -> None:
    """Random weights, one file a layer, and the index that says what is where."""
    import torch
    from safetensors.torch import save_file

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
