"""vLLM's MLA kernel, FlashAttention-3, for the calls of :class:`LatentAttention`."""

from __future__ import annotations

from typing import Any

import torch

from deft_backend.kernels.latent.kernel_batch import LatentCall


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
