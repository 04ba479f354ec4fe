"""Multi-head latent attention (MLA) for a model runner, or why the host computes it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from deft_backend.attention import LatentAttention, LatentCall
from deft_backend.hosts.common.division import Division, LayerShape
from deft_backend.hosts.common.latent import checked_latent_attention
from deft_backend.hosts.common.limits import Unsupported
from deft_backend.hosts.sglang import versions
from deft_backend.hosts.sglang.start.layers import device_of, unsupported_layer
from deft_backend.settings.config import Settings

_POOL = "MLATokenToKVPool"


class LatentLayer(NamedTuple):
    """Heads of this rank, and elements of a token's latent vector and of its rotated key."""

    heads: int
    value_dim: int
    rope_dim: int

    @classmethod
    def of(cls, layer: Any) -> LatentLayer:
        """The shape of a ``RadixAttention`` layer."""
        return cls(layer.tp_q_head_num, layer.v_head_dim, layer.qk_head_dim - layer.v_head_dim)


def is_latent(runner: Any) -> bool:
    """Whether a model runner's KV cache holds latent vectors."""
    return type(getattr(runner, "token_to_kv_pool", None)).__name__ == _POOL


def latent_attention(
    runner: Any, largest: int, query_tokens: int, settings: Settings
) -> tuple[LatentAttention, Division[int, LayerShape]]:
    """MLA for a model runner's layers, after it has passed a check on this machine.

    Raises Unsupported with the reason for the log.
    """
    device, dtype = device_of(runner), runner.dtype
    if runner.kv_cache_dtype != dtype or runner.token_to_kv_pool.store_dtype != dtype:
        raise Unsupported(
            f"MLA over KV in {runner.kv_cache_dtype} under a model in {dtype} is not supported"
        )
    shape, division = _divided(runner)
    attention = checked_latent_attention(
        shape.heads, shape[1:], dtype, device, sglang_latent_attention, settings,
        max_batch=largest, integers=(torch.int64, torch.int64), query_tokens=query_tokens,
        on_device=query_tokens > 1,
    )  # fmt: skip
    return attention, division


def _divided(runner: Any) -> tuple[LatentLayer, Division[int, LayerShape]]:
    """The one shape of the layers that decode over latent vectors, and all their ids."""
    found: dict[int, LatentLayer] = {}
    for layer in versions.attention_layers(runner.model):
        if layer.tp_k_head_num == 1 and layer.qk_head_dim > layer.v_head_dim:
            reason = unsupported_layer(layer, latent=True)
            if reason is not None:
                raise Unsupported(f"MLA with {reason} is not supported")
            found[layer.layer_id] = LatentLayer.of(layer)
    shapes = set(found.values())
    if len(shapes) != 1:
        raise Unsupported(f"MLA in {len(shapes)} shapes is not supported")
    shape = shapes.pop()
    held = LayerShape(shape.heads, 1, shape.value_dim + shape.rope_dim)
    return shape, Division(dict.fromkeys(sorted(found), held), {})


def sglang_latent_attention(call: LatentCall) -> tuple[torch.Tensor, torch.Tensor]:
    """SGLang's MLA kernel, FlashAttention-3: the attention and its log-sum-exps."""
    from sgl_kernel.flash_attn import flash_attn_with_kvcache

    values = call.q_nope.shape[-1]
    attend: Any = flash_attn_with_kvcache
    out, lse, *_ = attend(
        q=call.q_rope,
        k_cache=call.cache[..., values:],
        v_cache=call.cache[..., :values],
        qv=call.q_nope,
        page_table=call.page_table,
        cache_seqlens=call.batch.end,
        cache_batch_idx=call.batch.table_rows,
        cache_leftpad=call.batch.begin,
        cu_seqlens_q=call.batch.query_start,
        max_seqlen_q=call.max_query_tokens,
        softmax_scale=call.sm_scale,
        causal=call.causal,
        num_splits=call.most_splits,
        return_softmax_lse=True,
    )
    return out, lse
