"""A model made on this machine, with its shape, weights and tokenizer.

With random weights (:mod:`random_weights`), answers depend on every part of the KV cache. With
dummy weights, which the host makes up, a server starts sooner and needs no disk space. Dummy
weights are so small that attention does not change the logits, so only times can be compared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.e2e.own_process import ProcessFailed, run_module

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

LLAMA_70B: dict[str, Any] = {
    **LLAMA_8B, "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
    "num_attention_heads": 64,
}  # fmt: skip
"""The published shape of Llama-3.1-70B; a machine that is too small for all of its layers runs a
part of them."""

ONE_LAYER: dict[str, Any] = {
    **LLAMA_8B, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 1,
    "vocab_size": 1024, "bos_token_id": 1022, "eos_token_id": 1023,
}  # fmt: skip
"""A model so small that the host's scheduler sets the length of a decode step."""

TINY: dict[str, Any] = {
    **LLAMA_8B, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1024,
    "bos_token_id": 1022, "eos_token_id": 1023, "max_position_embeddings": 16384,
}  # fmt: skip
"""For a machine without a GPU."""

FOUR_LAYERS: dict[str, Any] = {
    **LLAMA_8B, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4,
    "vocab_size": 8192, "bos_token_id": 8190, "eos_token_id": 8191,
}  # fmt: skip
"""Loads in a second and has the heads of the large model: for answers, not for times."""

GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880,
    "intermediate_size": 2880, "num_hidden_layers": 24, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 201088, "num_local_experts": 32,
    "num_experts_per_tok": 4, "experts_per_token": 4, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 12, "attention_bias": True,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 150000.0,
    "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
                     "truncate": False, "original_max_position_embeddings": 4096},
    "hidden_act": "silu", "swiglu_limit": 7.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "bos_token_id": 199998, "eos_token_id": 200002,
}  # fmt: skip
"""The published shape of gpt-oss-20b: every other layer has a sliding window, all have sinks. Its
experts are unquantised here."""

QWEN35_9B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 4096,
    "intermediate_size": 12288, "num_hidden_layers": 32, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 256, "vocab_size": 248320,
    "full_attention_interval": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"] * 8,
    "linear_num_value_heads": 32, "linear_num_key_heads": 16, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000000.0,
                        "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
                        "mrope_interleaved": True},
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 248044,
    "eos_token_id": 248046,
}  # fmt: skip
"""The kinds of layers of Qwen3.5: three linear ones, then full attention with heads of 256."""

V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
    "intermediate_size": 10944, "num_hidden_layers": 27, "num_attention_heads": 16,
    "num_key_value_heads": 16, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
    "routed_scaling_factor": 1.0, "scoring_func": "softmax", "norm_topk_prob": False,
    "vocab_size": 102400, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "rope_scaling": None, "hidden_act": "silu", "attention_bias": False,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 100000,
    "eos_token_id": 100001,
}  # fmt: skip
"""The published shape of DeepSeek-V2-Lite, whose attention has latent vectors (MLA), without its
scaling of positions."""

LATENT: dict[str, Any] = {
    **V2_LITE, "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 4,
    "first_k_dense_replace": 4, "vocab_size": 8192, "bos_token_id": 8190, "eos_token_id": 8191,
}  # fmt: skip
"""Four layers with the attention of DeepSeek-V2-Lite, which is that of DeepSeek-V3 on one of eight
ranks: for answers, not for times."""

LATENT_DRAFTING: dict[str, Any] = {
    **LATENT, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
    "num_attention_heads": 8, "first_k_dense_replace": 5, "num_nextn_predict_layers": 1,
}  # fmt: skip
"""With the heads of a rank of Kimi K2, and a fifth layer that drafts (MTP)."""

KIMI_K2_RANK: dict[str, Any] = {
    **V2_LITE, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
    "hidden_size": 7168, "intermediate_size": 2304, "num_hidden_layers": 61,
    "num_attention_heads": 8, "num_key_value_heads": 8, "q_lora_rank": 1536,
    "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8,
    "moe_intermediate_size": 256, "topk_method": "noaux_tc", "routed_scaling_factor": 2.827,
    "scoring_func": "sigmoid", "norm_topk_prob": True, "num_nextn_predict_layers": 1,
    "vocab_size": 20480, "max_position_embeddings": 131072, "rope_theta": 50000.0,
    "bos_token_id": 20478, "eos_token_id": 20479,
}  # fmt: skip
"""One of eight ranks of Kimi K2 as a model of its own: an eighth of the published heads, of each
layer's and expert's inner size, and of the vocabulary. Experts are in 16 bits. A layer drafts
(MTP), as in DeepSeek-V3; Kimi K2 has none."""

SHAPES: Mapping[str, dict[str, Any]] = {
    "llama-3.1-8b": LLAMA_8B, "llama-3.1-70b": LLAMA_70B, "four-layers": FOUR_LAYERS,
    "one-layer": ONE_LAYER, "tiny": TINY, "gpt-oss-20b": GPT_OSS_20B, "qwen3.5-9b": QWEN35_9B,
    "v2-lite": V2_LITE, "kimi-k2-rank": KIMI_K2_RANK, "latent-16": LATENT,
    "latent-8": {**LATENT, "num_attention_heads": 8}, "latent-8-drafting": LATENT_DRAFTING,
}  # fmt: skip
WEIGHTS = ("random", "dummy")


class ModelError(ValueError):
    """A checkpoint folder that cannot be served with token ids, or could not be written."""


@dataclass(frozen=True)
class Model:
    """A model to serve.

    Attributes
    ----------
    path : str
        The checkpoint's folder.
    name : str
        Its name in rows.
    ids : int
        Prompts use token ids below this one; special tokens have larger ids.
    context : int
        Positions that the model supports.
    load_format : str, optional
        The host's ``--load-format``; None leaves it to the host.
    """

    path: str
    name: str
    ids: int
    context: int
    load_format: str | None = None


def write_model(
    folder: Path, shape: str, weights: str, served: str, seed: int = 0, layers: int | None = None
) -> Model:
    """Write a checkpoint of `shape` with a tokenizer of as many words as the model has tokens.

    Parameters
    ----------
    folder : Path
        Is created if it does not exist.
    shape, weights : str
        One of :data:`SHAPES` and of :data:`WEIGHTS`.
    served : str
        Dtype of the servers, for the model's name.
    seed : int
        Seed of the random weights. They are the same on all machines with the same kind of device.
    layers : int, optional
        Write only the first layers of the shape; the model's name says how many.

    Raises
    ------
    ModelError
        If the shape has no random weights, or they could not be written; the folder may then hold
        a part of them.
    """
    config = {**SHAPES[shape]}
    if weights == "random" and config["model_type"] != "llama" and "latent" not in shape:
        raise ModelError(
            f"{shape} has no random weights; pass --weights dummy, which measures times alone"
        )
    if layers is not None:
        config["num_hidden_layers"] = layers
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:layers]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, config["vocab_size"])
    if weights == "random":
        _write_weights(folder, seed)
    return written_model(folder, shape, weights, served, layers)


def written_model(
    folder: Path, shape: str, weights: str, served: str, layers: int | None = None
) -> Model:
    """The model that :func:`write_model` wrote before."""
    config = SHAPES[shape]
    part = "" if layers is None else f", {layers} of {config['num_hidden_layers']} layers"
    return Model(
        str(folder), f"{shape}{part}, {weights} weights, {served}",
        config["bos_token_id"], config["max_position_embeddings"],
        "dummy" if weights == "dummy" else None,
    )  # fmt: skip


def read_model(path: str) -> Model:
    """The user's own checkpoint.

    Raises
    ------
    ModelError
        If the folder has no ``config.json`` with the sizes of vocabulary and context.
    """
    try:
        config = _config(path)
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


def read_config(model: Model) -> dict[str, Any]:
    """The configuration of a checkpoint that was written or read before."""
    return _config(model.path)


def _config(path: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((Path(path) / "config.json").read_text())
    return config


def write_tokenizer(folder: Path, words: int) -> None:
    """A tokenizer of the words ``w0``, ``w1``, … with ids 0, 1, …, separated by spaces.

    The hosts' own clients draw random ids, decode them to text and send the text. The server must
    encode it to the same ids, or prompts have another length than the client wants.
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


def _write_weights(folder: Path, seed: int) -> None:
    try:
        run_module("benchmarks.e2e.random_weights", str(folder.resolve()), str(seed))
    except ProcessFailed as error:
        raise ModelError(f"random weights could not be written to {folder}: {error}") from error
