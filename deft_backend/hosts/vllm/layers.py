"""Which layers of a server's model tree attention decodes, and their keys and values."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from operator import is_
from typing import Any, NamedTuple

import torch

from deft_backend.hosts.common.limits import Division, LayerShape
from deft_backend.shapes import EIGHT_BIT_CACHES

UNQUANTISED = ("auto", "float16", "bfloat16", "float32")


class Layer(NamedTuple):
    shape: LayerShape
    # Scale and soft cap of the scores; no cap is 0.
    sm_scale: float
    logit_cap: float
    reason: str | None  # why the host's implementation decodes the layer; None if ours does
    sinks: bool = False  # whether each query head has a sink
    cache: str = "auto"  # vLLM's name for the kind of its KV cache
    # Factors of queries, stored keys and stored values of 8 bits: a float32 each, on the device.
    scales: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    # With MLA: elements of a token's latent vector. Its rotated key follows in `head_dim`.
    value_dim: int | None = None

    @property
    def kv_dtype(self) -> torch.dtype | None:
        name = EIGHT_BIT_CACHES.get(self.cache)
        return None if name is None else getattr(torch, name)

    def with_scales_of(self, module: Any) -> Layer:
        """The layer with the scales that the host's module holds now, if its cache has 8 bits."""
        if self.kv_dtype is None:
            return self
        scales = (module._q_scale, module._k_scale, module._v_scale)
        if self.scales is not None and all(map(is_, scales, self.scales)):
            return self
        if any(scale.numel() != 1 for scale in scales):
            return self._replace(reason=self.reason or "scales for each head")
        return self._replace(scales=scales)

    def scaled(self, sm_scale: float) -> Layer:
        """The layer with its implementation's present scale: some models set it in each forward."""
        if sm_scale == self.sm_scale:
            return self
        reason = self.reason if sm_scale > 0.0 else f"scale {sm_scale}"
        return self._replace(sm_scale=sm_scale, reason=reason)


def layer_of(init: Callable[..., None], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Layer:
    """Read a layer from the arguments of its implementation's constructor.

    `init` is the bound constructor; its signature names the arguments. If it passes all of them on,
    as an implementation made of two others does, the signature of the host's base class does.
    """
    given = _named(inspect.signature(init), args, kwargs)
    heads = int(given.pop("num_heads"))
    kv_heads = given.pop("num_kv_heads", None)
    shape = LayerShape(heads, heads if kv_heads is None else int(kv_heads), given.pop("head_size"))
    scale = float(given.pop("scale"))
    cap = float(given.pop("logits_soft_cap", None) or 0.0)
    sinks = given.pop("sinks", None) is not None
    cache = str(given.pop("kv_cache_dtype", "auto"))
    value_dim = given.pop("kv_lora_rank", None)
    reason = None
    if value_dim is not None:
        for name in _LATENT_ARGUMENTS:
            given.pop(name, None)
        reason = None if cache in UNQUANTISED else f"MLA over a KV cache of kind {cache}"
    reason = reason or _reason(given, scale, cap, cache)
    return Layer(shape, scale, cap, reason, sinks, cache, value_dim=value_dim)


_LATENT_ARGUMENTS = (
    "q_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "qk_head_dim",
    "v_head_dim",
    "kv_b_proj",
)
"""Arguments of MLA that only its prefill and its projections use."""


def kv_views(kv_cache: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one layer, as :meth:`TreeAttention.run` takes them; nothing is copied.

    - `kv_cache`: [pages, Hkv, page_size, 2 * D] in any memory order with a contiguous last
      dimension (NHD or HND, padded pages, layers side by side).

    Returns `k_cache` and `v_cache`: [pages, page_size, Hkv, D].
    """
    paged = kv_cache.transpose(1, 2)
    return paged[..., :head_dim], paged[..., head_dim:]


def _named(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    kinds = {name: parameter.kind for name, parameter in signature.parameters.items()}
    if inspect.Parameter.VAR_POSITIONAL in kinds.values():
        from vllm.v1.attention.backend import AttentionImpl

        names = list(inspect.signature(AttentionImpl.__init__).parameters)[1:]
        names += map(str, range(len(names), len(args)))  # further ones are unknown
        return {**dict(zip(names, args, strict=False)), **kwargs}
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    given: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        given.update(value if kinds[name] is inspect.Parameter.VAR_KEYWORD else {name: value})
    return given


def _reason(rest: dict[str, Any], scale: float, cap: float, cache: str) -> str | None:
    kind = rest.pop("attn_type", "decoder")
    kind = str(getattr(kind, "value", kind))
    if kind != "decoder":
        return f"attention of type {kind}"
    for name, text in (
        ("sliding_window", "a sliding window"),
        ("alibi_slopes", "alibi slopes"),
        ("kv_sharing_target_layer_name", "the KV cache of another layer"),
    ):
        if rest.pop(name, None) is not None:
            return text
    if cache not in (*UNQUANTISED, *EIGHT_BIT_CACHES):
        return f"a KV cache of kind {cache}"
    if not scale > 0.0 or cap < 0.0:
        return f"scale {scale} and soft cap {cap}"
    if rest.get("chunk_lookback") == -1:  # TRITON_ATTN's value for no cap
        del rest["chunk_lookback"]
    for name, value in rest.items():
        if value is not None and value is not False:
            return f"the argument {name}"
    return None


LINEAR = "linear or recurrent attention"
DRAFT = "a draft model"

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_DRAFT = re.compile(r"^draft_model\.|(?:^|\.)(?:mtp|eagle)\w*\.")


def divide_layers(vllm_config: Any) -> Division[str, Layer]:
    """Decide on every layer of a server's model, by its own cache specification: its group's may
    have another layer's window.
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


def unsupported_kind(module: Any, vllm_config: Any) -> str | None:
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
    if type(spec) is FullAttentionSpec and spec.head_size_v not in (None, spec.head_size):
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
