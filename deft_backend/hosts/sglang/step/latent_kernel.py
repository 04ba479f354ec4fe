"""SGLang's MLA kernel, FlashAttention-3, for the calls of :class:`LatentAttention`."""

from __future__ import annotations

from typing import Any

import torch

from deft_backend.attention import LatentCall


def sglang_latent_attention(call: LatentCall) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention and its log-sum-exps; rows of the page table and ranges go in as they are."""
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
