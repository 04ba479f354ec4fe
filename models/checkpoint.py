"""The architectures of the tiny models and their folders in the Hugging Face format."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from byte_tokens import BOS, CHAT_TEMPLATE, EOS, PAD, VOCABULARY_SIZE, build_tokenizer
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging

WEIGHTS_FILE = "model.safetensors"
CONTEXT_SIZE = 16384
# The text has recalls over thousands of bytes. A high base leaves half of the rotary
# dimensions nearly still over that distance, so that attention can match by content alone.
ROPE_THETA = 100_000.0

ARCHITECTURE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": CONTEXT_SIZE,
    # transformers 4 reads rope_theta and torch_dtype, transformers 5 the key after each.
    "rope_theta": ROPE_THETA,
    "rope_parameters": {"rope_type": "default", "rope_theta": ROPE_THETA},
    "torch_dtype": "float16",
    "dtype": "float16",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "use_cache": True,
}

DRAFT_ARCHITECTURE: dict[str, Any] = {
    **ARCHITECTURE,
    "hidden_size": 64,
    "intermediate_size": 192,
    # Two layers are the fewest that can copy from earlier text.
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
"""The draft model for speculative decoding: same vocabulary, a sixth of the parameters."""

TOKENIZER_CONFIG: dict[str, Any] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<|bos|>",
    "eos_token": "<|eos|>",
    "pad_token": "<|pad|>",
    "add_bos_token": False,
    "clean_up_tokenization_spaces": False,
    "model_max_length": CONTEXT_SIZE,
    "chat_template": CHAT_TEMPLATE,
}

GENERATION_CONFIG: dict[str, Any] = {
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": PAD,
    "do_sample": False,
}


def new_model(architecture: dict[str, Any]) -> nn.Module:
    """Return a model with random weights, in float32."""
    config = LlamaConfig(**{**architecture, "torch_dtype": "float32", "dtype": "float32"})
    model: nn.Module = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    return model.to(torch.float32)


def save(model: nn.Module, folder: Path, architecture: dict[str, Any]) -> None:
    """Write the checkpoint without its README, with the weights rounded to float16."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.half().contiguous() for name, weight in model.state_dict().items()}
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / WEIGHTS_FILE).chmod(0o644)
    build_tokenizer().save(str(folder / "tokenizer.json"))
    _write_json(folder / "config.json", architecture)
    _write_json(folder / "tokenizer_config.json", TOKENIZER_CONFIG)
    _write_json(folder / "generation_config.json", GENERATION_CONFIG)


def load(folder: Path, dtype: torch.dtype) -> nn.Module:
    """Read the checkpoint to compute with it in ``dtype``."""
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder)
    return model.to(dtype).eval()


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
