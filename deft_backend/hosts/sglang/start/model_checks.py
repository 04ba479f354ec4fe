"""Whether tree attention can run a model runner's layers, and which of them."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch

from deft_backend.hosts.sglang.report.server import division_of
from deft_backend.hosts.sglang.start.caches import full_cache
from deft_backend.hosts.sglang.start.layers import Division, Shape
from deft_backend.hosts.sglang.versions import attention_layers
from deft_backend.shapes.dtype_names import EIGHT_BIT_CACHES

_IGNORE_SCALES = ("torch_native", "flex_attention")

_LAYERS = ("torch.", "sglang.srt.layers.")
"""Modules of layers, which models of any package use. Attention layers call the backend by its
``forward``."""


class Unsupported(RuntimeError):
    """The reason, in one line, why the host's own backend runs this model runner's attention."""


def unsupported_model(runner: Any) -> str | None:
    """Why a model runner's KV cache rules out tree attention, in one line, or None."""
    cache = full_cache(runner.token_to_kv_pool)
    if isinstance(cache, str):
        return cache
    if str(runner.kv_cache_dtype).removeprefix("torch.") in EIGHT_BIT_CACHES.values():
        return None
    if runner.kv_cache_dtype != runner.dtype or cache.pool.store_dtype != runner.dtype:
        return f"KV in {runner.kv_cache_dtype} under a model in {runner.dtype} is not supported"
    return None


def ignored_scales(runner: Any, name: str) -> str | None:
    """Why the scales of a cache of 8 bits rule out tree attention around a backend, or None.

    These backends write and read such a cache without its scales. Tree attention follows the
    scales, so it would read other values than prefill has written.
    """
    if name not in _IGNORE_SCALES or runner.kv_cache_dtype.itemsize > 1:
        return None
    if all(
        layer.k_scale is None and layer.v_scale is None for layer in attention_layers(runner.model)
    ):
        return None
    return f"{name} ignores the scales of a KV cache in {runner.kv_cache_dtype}"


def divided(runner: Any) -> tuple[Division, Shape]:
    """The layers that tree attention decodes, at least one, and their shape."""
    division = division_of(runner)
    if division.shape is None:
        reasons = "; ".join(dict.fromkeys(division.host.values()))
        raise Unsupported(f"not supported in any layer: {reasons}")
    return division, division.shape


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
