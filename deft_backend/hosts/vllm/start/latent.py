"""Multi-head latent attention (MLA) by vLLM's own kernel, FlashAttention-3."""

from __future__ import annotations

from typing import Any

import torch

from deft_backend.attention import LatentAttention, LatentCall
from deft_backend.hosts.common.latent import checked_latent_attention
from deft_backend.hosts.common.limits import MLA_IS_OFF, Unsupported
from deft_backend.hosts.common.ranks import same_on_all_ranks
from deft_backend.hosts.vllm.start.division import query_tokens_of
from deft_backend.hosts.vllm.start.layers import Layer
from deft_backend.hosts.vllm.step.latent import LatentGroup
from deft_backend.settings.config import Settings
from deft_backend.settings.policy_names import AUTO
from deft_patches.vllm import observe_steps, tree_graphs

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
    layer: Layer, vllm_config: Any, device: torch.device, settings: Settings, *, page_size: int,
    max_batch: int,
) -> LatentAttention:  # fmt: skip
    """MLA for the layers of a group, after it has passed a check on this machine.

    Raises Unsupported with the reason for the log.
    """
    assert layer.value_dim is not None
    parallel = vllm_config.parallel_config
    # A server with elastic expert parallelism may get more ranks while it runs.
    if parallel.data_parallel_size > 1 or getattr(parallel, "enable_elastic_ep", False):
        # Each rank would choose between its two sets of graphs by its own requests. But graphs hold
        # collectives, so all ranks must replay the same set.
        raise Unsupported("MLA with data parallelism is not supported")
    reason = observe_steps.missing()
    if reason is None and device.type == "cuda":
        reason = unsupported_graphs(vllm_config)
    if reason is not None:
        raise Unsupported(f"MLA cannot leave batches to the host: {reason}")
    if settings.policy != AUTO or settings.planner == "host":
        raise Unsupported(
            "MLA takes device plans of the policy auto alone; unset DEFT_POLICY and DEFT_PLANNER"
        )
    heads, _, dim = layer.shape
    return checked_latent_attention(
        heads, (layer.value_dim, dim - layer.value_dim), vllm_config.model_config.dtype, device,
        vllm_latent_attention, settings, max_batch=max_batch, integers=(torch.int32, torch.int32),
        page_size=page_size, query_tokens=query_tokens_of(vllm_config), on_device=True,
    )  # fmt: skip


def unsupported_graphs(vllm_config: Any) -> str | None:
    """Why the host cannot capture a second set of graphs, in one line; or None."""
    if not vllm_config.use_v2_model_runner:
        return "only model runner V2 has graphs for both (VLLM_USE_V2_MODEL_RUNNER=1)"
    return tree_graphs.missing()


def capture_both(group: LatentGroup | None, vllm_config: Any, settings: Settings) -> str | None:
    """Ask for a second set of graphs, with tree attention; the reason if there is none, or None.

    All ranks must call this, also those whose set-up failed: ranks with different sets would wait
    for each other forever during the capture.

    - `group`: this rank's tree attention; None if its set-up failed.
    """
    from vllm.distributed.parallel_state import get_tp_group

    ranks = vllm_config.parallel_config.tensor_parallel_size
    mine = None if group is None else (settings, group.attention.capacity, group.tree_layers)
    agreed = same_on_all_ranks(get_tp_group() if ranks > 1 else None, mine)
    if agreed is False:
        return "its ranks have different settings (DEFT_*)"
    if agreed is None or group is None:
        return "another rank has no tree attention"
    if group.attention.device.type == "cuda":
        tree_graphs.install(vllm_config, group)
    return None


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
