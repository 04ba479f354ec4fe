"""Multi-head latent attention (MLA) by vLLM's own kernel, FlashAttention-3."""

from __future__ import annotations

from typing import Any

import torch

from deft_backend.attention import AttentionError, LatentAttention, LatentCall
from deft_backend.hosts.common.latent import checked_latent_attention
from deft_backend.hosts.common.limits import MLA_IS_OFF
from deft_backend.hosts.vllm.start.layers import Layer, Unsupported
from deft_backend.settings.config import Settings
from deft_backend.settings.policy_names import AUTO

BACKEND = "FLASH_ATTN_MLA"


def unsupported_latent(host: Any, settings: Settings) -> str | None:
    """Why one of the host's MLA backends cannot be surrounded, in one line, or None."""
    if host.is_sparse():
        return "sparse MLA is not supported"
    if not settings.mla:
        return MLA_IS_OFF
    if host.get_name() != BACKEND:
        return f"MLA through {host.get_name()} is not supported ({BACKEND} is)"
    return None


def latent_attention(
    layer: Layer, dtype: torch.dtype, device: torch.device, settings: Settings, *, page_size: int,
    max_batch: int, query_tokens: int,
) -> LatentAttention:  # fmt: skip
    """MLA for the layers of a group, after it has passed a check on this machine.

    Raises Unsupported with the reason for the log.
    """
    assert layer.value_dim is not None
    if query_tokens > 1:
        raise Unsupported("MLA with speculation is not supported in vLLM")
    if settings.policy != AUTO or settings.planner == "host":
        raise Unsupported(
            "MLA is planned on the device by the policy auto (DEFT_POLICY, DEFT_PLANNER)"
        )
    heads, _, dim = layer.shape
    try:
        return checked_latent_attention(
            heads, (layer.value_dim, dim - layer.value_dim), dtype, device, vllm_latent_attention,
            max_batch=max_batch, page_size=page_size, on_device=True,
        )  # fmt: skip
    except AttentionError as error:
        raise Unsupported(str(error)) from None


def vllm_latent_attention(call: LatentCall) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention and its log-sum-exps.

    vLLM's Python function leaves out two arguments of its operator that we need: the row of the
    page table and the first token of each entry. So this calls the operator.
    """
    from vllm.vllm_flash_attn import flash_attn_interface  # noqa: F401

    operators: Any = torch.ops
    values, nothing = call.q_nope.shape[-1], None
    most_tokens = call.page_table.shape[1] * call.cache.shape[1]
    out, lse, *_ = operators._vllm_fa3_C.fwd(
        call.q_rope, call.cache[..., values:], call.cache[..., :values],
        nothing, nothing,  # new keys and values
        call.q_nope,
        nothing,  # out
        call.batch.query_start,
        nothing, nothing, nothing,  # starts of keys and of new keys, query tokens in use
        call.batch.end, call.max_query_tokens, most_tokens, call.page_table,
        call.batch.table_rows, call.batch.begin,
        nothing, nothing, nothing,  # rotary embedding
        nothing, nothing, nothing,  # scales
        call.sm_scale, call.causal,
        -1, -1, 0.0,  # no window, no soft cap
        True,  # rotary embedding, interleaved
        nothing,  # scheduler metadata
        call.most_splits,
        nothing, 0, nothing,  # packing of heads, SMs to spare, sinks
        1, 0, nothing,  # context parallelism
    )  # fmt: skip
    return out, lse
