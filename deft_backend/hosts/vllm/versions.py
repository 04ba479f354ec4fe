"""Does this vLLM look as the adapter expects? Knowledge of versions stands here, and only here."""

from __future__ import annotations

import inspect

from deft_backend.hosts.common.tested_versions import VLLM


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
        ("AttentionBackend", "get_kv_cache_shape", ("num_blocks", "block_size")),
    ):
        method = getattr(getattr(backend, owner, None), name, None)
        if method is None:
            return f"{owner}.{name} is missing"
        known = inspect.signature(method).parameters
        absent = [parameter for parameter in needed if parameter not in known]
        if absent:
            return f"{owner}.{name} has no parameter {absent[0]}"
    fields = getattr(backend.CommonAttentionMetadata, "__dataclass_fields__", {})
    wanted = {"seq_lens", "block_table_tensor", "max_query_len", "num_reqs", "num_actual_tokens"}
    if not wanted <= set(fields):
        return f"CommonAttentionMetadata has no field {sorted(wanted - set(fields))[0]}"
    if "attn_type" not in getattr(AttentionSelectorConfig, "_fields", ()):
        return "AttentionSelectorConfig has no field attn_type"
    if "sliding_window" not in getattr(FullAttentionSpec, "__dataclass_fields__", {}):
        return "FullAttentionSpec has no field sliding_window"
    return None
