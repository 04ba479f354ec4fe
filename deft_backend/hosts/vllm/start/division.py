"""Decide for each layer of a server's model whether tree attention decodes it."""

import re
from collections.abc import Iterator
from typing import Any

from deft_backend.hosts.common.division import Division
from deft_backend.hosts.vllm.start.layers import Layer

LINEAR = "linear or recurrent attention"
DRAFT = "a draft model"

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_DRAFT = re.compile(r"^draft_model\.|(?:^|\.)(?:mtp|eagle)\w*\.")


def divide_layers(vllm_config: Any) -> Division[str, Layer]:
    """Decide on every layer of a server's model; the draft model's are the host's.

    The arguments of a layer's implementation do not show, for example, chunked attention. So each
    layer's own cache specification counts too. That of its group may have another layer's window.
    """
    tree: dict[str, Layer] = {}
    host: dict[str, str] = {}
    for name, module in vllm_config.compilation_config.static_forward_context.items():
        impl: Any = getattr(module, "impl", None)
        layer: Layer | None = getattr(impl, "deft_layer", None)
        if drafts(name, vllm_config):
            # A draft may run with the metadata of the target's step.
            if layer is not None:
                impl.deft_layer = layer._replace(reason=DRAFT)
            continue
        reason = unsupported_kind(module, vllm_config)
        if layer is not None and reason is not None and layer.reason is None:
            layer = impl.deft_layer = layer._replace(reason=reason)
        if layer is not None and layer.reason is None:
            tree[name] = layer
        elif layer is not None or reason is not None:
            host[name] = str(reason if layer is None else layer.reason)
    return Division(tree, host)


def attending_layers(vllm_config: Any, *, full: bool) -> Iterator[str]:
    """Names of the target's attention layers; with `full`, only those with full attention."""
    for name, module in vllm_config.compilation_config.static_forward_context.items():
        attends = getattr(module, "impl", None) is not None and not drafts(name, vllm_config)
        if attends and not (full and unsupported_kind(module, vllm_config)):
            yield name


def unsupported_kind(module: Any, vllm_config: Any) -> str | None:
    """Why a layer's own cache specification rules out tree attention, in a few words; or None."""
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    ask = getattr(module, "get_kv_cache_spec", None)
    spec = None if ask is None else ask(vllm_config)
    if spec is None:  # no cache of its own
        return None
    if isinstance(spec, MambaSpec):
        return LINEAR
    if isinstance(spec, SlidingWindowSpec) or getattr(spec, "sliding_window", None) is not None:
        return "a sliding window"
    if getattr(spec, "attention_chunk_size", None) is not None:
        return "chunked local attention"
    # Subclasses are other kinds of caches.
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
        return f"a KV cache of kind {type(spec).__name__}"
    if spec.non_causal:
        return "attention that is not causal"
    if type(spec) is MLAAttentionSpec:
        return None
    if spec.head_size_v not in (None, spec.head_size):
        return f"keys of {spec.head_size} and values of {spec.head_size_v} elements"
    return None


def drafts(layer_name: str, vllm_config: Any) -> bool:
    """Whether a layer belongs to the draft model, which the host's backend runs.

    Newer versions mark such a layer. Else its name decides: it has a prefix, or, for EAGLE and MTP,
    counts on from the target's last layer.
    """
    if vllm_config.speculative_config is None:
        return False
    layer = vllm_config.compilation_config.static_forward_context.get(layer_name)
    if getattr(layer, "is_draft_layer", False) or _DRAFT.search(layer_name):
        return True
    numbered = _LAYER.search(layer_name)
    layers = getattr(vllm_config.model_config.hf_text_config, "num_hidden_layers", None)
    return numbered is not None and layers is not None and int(numbered.group(1)) >= layers


def query_tokens_of(vllm_config: Any) -> int:
    """Most query tokens of a request: the draft tokens and the token before them; 1 in decode."""
    speculative = vllm_config.speculative_config
    return 1 if speculative is None else 1 + int(speculative.num_speculative_tokens)
