"""Multi-head latent attention (MLA) for a host's layers, or why the host computes it."""

from __future__ import annotations

from typing import Any

import torch

from deft_backend.attention import (
    AttentionError,
    LatentAttention,
    LatentKernel,
    plain_latent_attention,
)
from deft_backend.attention.self_check import failed_latent_check
from deft_backend.forest import PrefixForest
from deft_backend.hosts.common.limits import HOPPER, Unsupported, refuse_if
from deft_backend.hosts.common.warm_up import compile_for_server, latent_variants, ranks_cache
from deft_backend.settings.config import Settings
from deft_backend.settings.policy_names import AUTO
from deft_backend.shapes import ROPE_DIM, VALUE_DIM


def checked_latent_attention(
    num_query_heads: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    kernel: LatentKernel,
    settings: Settings,
    *,
    integers: torch.dtype,
    **sizes: Any,
) -> LatentAttention:
    """MLA by the host's `kernel`, or a stand-in on the CPU; raises Unsupported if its check here
    fails. `sizes` are those of :class:`LatentAttention`: page, batch and query tokens.
    """
    if settings.policy != AUTO:
        raise Unsupported("MLA follows the policy auto alone; unset DEFT_POLICY")
    if device.type == "cuda" and torch.cuda.get_device_capability(device) != HOPPER:
        raise Unsupported("MLA needs a GPU of compute capability 9.0 (Hopper)")
    if device.type == "cuda" and dims != (VALUE_DIM, ROPE_DIM):
        raise Unsupported(
            f"MLA of rank {dims[0]} + {dims[1]} is not supported ({VALUE_DIM} + {ROPE_DIM} is)"
        )
    try:
        attention = LatentAttention(
            num_query_heads=num_query_heads,
            dtype=dtype,
            device=device,
            kernel=kernel if device.type == "cuda" else plain_latent_attention,
            value_dim=dims[0],
            rope_dim=dims[1],
            **sizes,
        )
    except AttentionError as error:
        raise Unsupported(str(error)) from None
    with ranks_cache(settings, attention.device) as shared:
        if device.type == "cuda":
            variants = latent_variants(attention, integers)
            compile_for_server(variants, attention.device, shared)
        refuse_if(failed_latent_check(attention))
    return attention


def gains_too_little(
    attention: LatentAttention, forest: PrefixForest, num_layers: int
) -> str | None:
    if forest.tokens_attended == forest.tokens_stored:
        return "shares nothing"
    if attention.device.type == "cuda" and not attention.gains(forest, num_layers):
        return "shares too little to be faster"
    return None
