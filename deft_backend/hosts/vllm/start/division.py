"""Decide for each layer of a model whether tree attention decodes it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from deft_backend.hosts.vllm.start.layers import Layer, LayerShape
from deft_backend.hosts.vllm.start.speculation import drafts

LINEAR = "linear or recurrent attention"
DRAFT = "a draft model"


class Division(NamedTuple):
    """Which of a model's layers decode through tree attention, by the layers' names.

    Attributes
    ----------
    tree : mapping
        These layers.
    host : mapping
        For each other layer, the reason why vLLM's implementation decodes it.
    """

    tree: Mapping[str, Layer]
    host: Mapping[str, str]

    def layers_with(self, shape: LayerShape, kv_dtype: torch.dtype | None) -> int:
        """Layers of tree attention with this shape and a KV cache of this dtype.

        None is the model's dtype.
        """
        return sum(
            layer.shape == shape and layer.kv_dtype == kv_dtype for layer in self.tree.values()
        )

    def text(self) -> str | None:
        """The division in one line, or None if tree attention decodes every layer."""
        if not self.host:
            return None
        reasons = Counter(self.host.values())
        parts = [f"{count} with {reason}" for reason, count in reasons.most_common()]
        return (
            f"{len(self.tree)} of {len(self.tree) + len(self.host)} layers decode through tree "
            f"attention; {', '.join(parts)} through the host's kernels"
        )


def divide_layers(vllm_config: Any) -> Division:
    """Decide on every layer of a server's model; the draft model's are the host's.

    The arguments of a layer's implementation do not show everything: chunked attention, for
    example, is a kind of layer. So the function also reads the layer's own cache specification.
    Layers whose caches vLLM manages together may differ: with one kind of cache for all, the
    specification of such a group has the window of any layer.
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
        if layer is None:
            if reason is not None:
                host[name] = reason
            continue
        if layer.reason is None and reason is not None:
            layer = impl.deft_layer = layer._replace(reason=reason)
        if layer.reason is None:
            tree[name] = layer
        else:
            host[name] = layer.reason
    return Division(tree, host)


def unsupported_kind(module: Any, vllm_config: Any) -> str | None:
    """Why a layer's own cache specification rules out tree attention, in a few words; or None."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

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
    if type(spec) is not FullAttentionSpec:  # its subclasses are other kinds of caches
        return f"a KV cache of kind {type(spec).__name__}"
    if spec.non_causal:
        return "attention that is not causal"
    if spec.head_size_v not in (None, spec.head_size):
        return f"keys of {spec.head_size} and values of {spec.head_size_v} elements"
    return None
