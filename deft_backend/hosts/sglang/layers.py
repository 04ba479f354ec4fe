"""Decide which of a model runner's layers tree attention can run: by its cache and its layers."""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import torch

from deft_backend.attention import TreeAttention
from deft_backend.hosts.common.limits import Division, LayerShape, Unsupported
from deft_backend.hosts.sglang.versions import attention_layers, attention_ranks
from deft_backend.shapes import EIGHT_BIT_CACHES

_IGNORE_SCALES = ("torch_native", "flex_attention")

_LAYERS = ("torch.", "sglang.srt.layers.")
"""Modules of layers, which models of any package use. Attention layers call the backend by its
``forward``."""


class FullCache(NamedTuple):
    pool: Any  # the host's ``MHATokenToKVPool`` that holds these layers' keys and values
    # The model's ids of these layers; None: every layer of the model runner.
    layers: Collection[int] | None

    def holds(self, layer_id: int, shape: tuple[int, int, int]) -> bool:
        held = self.layers is None or layer_id in self.layers
        return held and tuple(self.keys.shape[-2:]) == shape[1:]

    @property
    def keys(self) -> Any:
        return self.pool.get_key_buffer(self.pool.start_layer)

    @property
    def values(self) -> Any:
        return self.pool.get_value_buffer(self.pool.start_layer)


def full_cache(pool: Any) -> FullCache | str:
    """The full-attention part of a model runner's pool, or why tree attention cannot read it.
    Sliding windows (``SWAKVPool``) and recurrent layers (``HybridLinearKVPool``) have their own.
    """
    kind = type(pool).__name__
    if kind == "SWAKVPool":
        full = [layer for layer, (_, windowed) in pool.layers_mapping.items() if not windowed]
        cache = FullCache(pool.full_kv_pool, frozenset(full))
    elif kind == "HybridLinearKVPool":
        cache = FullCache(pool.full_kv_pool, frozenset(pool.full_attention_layer_id_mapping))
    else:
        cache = FullCache(pool, None)
    inner = type(cache.pool).__name__
    if inner != "MHATokenToKVPool":
        name = kind if inner == kind else f"{kind} over {inner}"
        return f"a KV cache of kind {name} is not supported"
    if cache.layers is not None and not cache.layers:
        return f"a KV cache of kind {kind} without full-attention layers is not supported"
    layout = getattr(cache.pool, "kv_cache_layout", "nhd")
    layout = "hnd" if getattr(cache.pool, "use_hnd", False) else layout
    if layout != "nhd":
        return f"a KV cache in the layout {layout} is not supported"
    return cache


def divided(runner: Any) -> tuple[Division[int, LayerShape], LayerShape]:
    """A model runner's layers, and the shape of those through tree attention; or Unsupported."""
    pool, device = runner.token_to_kv_pool, device_of(runner)

    def refused(shape: LayerShape) -> str | None:
        return TreeAttention.unsupported(*shape, runner.dtype, device)

    cache = full_cache(pool)
    layers = attention_layers(runner.model)
    if not isinstance(cache, str) and layers:
        others = getattr(runner.req_to_token_pool, "mamba_map", ())
        division = divide_layers(layers, cache, others, refused)
    else:
        keys = pool.get_key_buffer(pool.start_layer)
        heads = runner.model_config.num_attention_heads // attention_ranks()
        shape = LayerShape(heads, int(keys.shape[-2]), int(keys.shape[-1]))
        ids, reason = range(int(pool.layer_num)), refused(shape)
        division = Division(dict.fromkeys(ids, shape), {})
        if reason is not None:
            division = Division({}, dict.fromkeys(ids, reason))
    if not division.tree:
        reasons = "; ".join(dict.fromkeys(division.host.values()))
        raise Unsupported(f"tree attention can run no layer of this model: {reasons}")
    return division, next(iter(division.tree.values()))


def divide_layers(
    layers: Iterable[Any],
    cache: FullCache,
    others: Iterable[int] = (),
    refused: Callable[[LayerShape], str | None] = lambda shape: None,
) -> Division[int, LayerShape]:
    """Decide on every layer of a model. A plan serves one shape of heads: that of most layers."""
    shapes: dict[int, LayerShape] = {}
    host: dict[int, str] = {}
    for layer in layers:
        shape = _shape_of(layer)
        reason = unsupported_layer(layer) or refused(shape)
        if reason is None and not cache.holds(layer.layer_id, shape):
            reason = "a KV cache of another kind"
        if reason is not None:
            host[layer.layer_id] = reason
        else:
            shapes[layer.layer_id] = shape
    planned = Counter(shapes.values()).most_common(1)[0][0] if shapes else None
    for layer_id, shape in shapes.items():
        if planned is not None and shape != planned:
            host[layer_id] = _other_shape(shape, planned)
    for layer_id in others:  # a layer may have both kinds of attention side by side
        if layer_id not in shapes:
            host.setdefault(layer_id, "linear or recurrent attention")
    tree = {layer_id: shapes[layer_id] for layer_id in sorted(shapes) if layer_id not in host}
    return Division(tree, host)


def _shape_of(layer: Any) -> LayerShape:
    return LayerShape(layer.tp_q_head_num, layer.tp_k_head_num, layer.qk_head_dim)


def _other_shape(shape: LayerShape, planned: LayerShape) -> str:
    return (
        f"{shape[0]} query and {shape[1]} KV heads of {shape[2]}; the model's other layers "
        f"have {planned[0]} and {planned[1]} of {planned[2]}"
    )


def unsupported_layer(
    layer: Any, planned: LayerShape | None = None, *, latent: bool = False
) -> str | None:
    """Why the host's kernel runs a ``RadixAttention`` layer, in one line; or None."""
    if layer.is_cross_attention:
        return "cross attention"
    if layer.attn_type.value != "decoder":
        return f"{layer.attn_type.value} attention"
    if layer.sliding_window_size is not None and layer.sliding_window_size > -1:
        return "a sliding window"
    if getattr(layer, "use_irope", False):
        return "chunked local attention"
    if getattr(layer, "pos_encoding_mode", "NONE") != "NONE":
        return f"position encoding {layer.pos_encoding_mode} inside attention"
    if getattr(layer, "xai_temperature_len", -1) > 0:
        return "a temperature by position"
    if layer.logit_cap and getattr(layer, "logit_capping_method", "tanh") != "tanh":
        return f"{layer.logit_capping_method} capping of the scores"
    if latent:
        return "a soft cap of the scores" if layer.logit_cap else None
    if layer.qk_head_dim != layer.v_head_dim:
        return f"keys of {layer.qk_head_dim} and values of {layer.v_head_dim} elements"
    if layer.tp_k_head_num != layer.tp_v_head_num:
        return f"{layer.tp_k_head_num} key heads and {layer.tp_v_head_num} value heads"
    shape = _shape_of(layer)
    return None if planned is None or shape == planned else _other_shape(shape, planned)


def device_of(runner: Any) -> torch.device:
    if runner.device == "cuda":
        return torch.device("cuda", runner.gpu_id)
    return torch.device(runner.device)


def unsupported_model(runner: Any) -> str | None:
    cache = full_cache(runner.token_to_kv_pool)
    if isinstance(cache, str):
        return cache
    if str(runner.kv_cache_dtype).removeprefix("torch.") in EIGHT_BIT_CACHES.values():
        return None
    if runner.kv_cache_dtype != runner.dtype or cache.pool.store_dtype != runner.dtype:
        return f"KV in {runner.kv_cache_dtype} under a model in {runner.dtype} is not supported"
    return None


def ignored_scales(runner: Any, name: str) -> str | None:
    """Why the scales of a cache of 8 bits rule out tree attention: these backends ignore them."""
    if name not in _IGNORE_SCALES or runner.kv_cache_dtype.itemsize > 1:
        return None
    if all(
        layer.k_scale is None and layer.v_scale is None for layer in attention_layers(runner.model)
    ):
        return None
    return f"{name} ignores the scales of a KV cache in {runner.kv_cache_dtype}"


def model_asks(runner: Any) -> bool:
    """Whether the model calls its attention backend directly, besides through attention layers."""
    kinds = {kind for part in runner.model.modules() for kind in type(part).__mro__}
    modules = {kind.__module__ for kind in kinds if issubclass(kind, torch.nn.Module)}
    return any(
        "get_attn_backend" in _source(name) for name in modules if not name.startswith(_LAYERS)
    )


def _source(module: str) -> str:
    """The source of a loaded module, because such calls may import their backend locally."""
    try:
        return inspect.getsource(sys.modules[module])
    except (OSError, TypeError):
        return "get_attn_backend"  # unreadable source: assume that it does
