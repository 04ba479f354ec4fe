"""`deft warm` for a model with latent attention (MLA)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deft_backend.cli.errors import fail
from deft_backend.cli.shapes import LatentHeads, dtype_name
from deft_backend.settings.policy_names import AUTO
from deft_backend.shapes.latent_shape import ROPE_DIM, VALUE_DIM

if TYPE_CHECKING:
    from deft_backend.hosts.common.described_latent import DescribedLatentServer
    from deft_backend.hosts.common.warm_up import Drafts
    from deft_backend.settings.config import Settings


def described_latent(
    latent: LatentHeads, settings: Settings, *, host: str, page_size: int, max_batch: int,
    tensor_parallel: int, kv_cache_dtype: str, drafts: Drafts | None,
) -> DescribedLatentServer:  # fmt: skip
    """The server of an MLA model; fails if such a server would leave it to the host."""
    if not settings.mla:
        raise fail(
            "the model has latent attention (MLA), which a server leaves to the host unless "
            "DEFT_MLA=1 is set; set it here, too"
        )
    if settings.policy != AUTO:
        raise fail(f"DEFT_POLICY is {settings.policy}, and MLA takes plans of auto alone; unset it")
    refused = "host" if host == "vllm" else "device" if drafts is None else None
    if settings.planner == refused:
        raise fail(f"DEFT_PLANNER is {refused}, with which MLA stays with the host; unset it")
    if latent.sparse:
        raise fail("the model's latent attention (MLA) is sparse, which is not supported")
    if (latent.value_dim, latent.rope_dim) != (VALUE_DIM, ROPE_DIM):
        raise fail(
            f"the model has MLA of rank {latent.value_dim} + {latent.rope_dim}; expected "
            f"{VALUE_DIM} + {ROPE_DIM}: a server leaves others to the host"
        )
    if kv_cache_dtype != "auto":
        raise fail(
            f"--kv-cache-dtype is {kv_cache_dtype}, and MLA reads caches in the model's dtype "
            "alone; leave it out"
        )
    if drafts is not None and drafts.trees:
        raise fail("--draft-trees is given, but servers verify MLA's chains alone; leave it out")
    if latent.query_heads % tensor_parallel:
        raise fail(
            f"--tensor-parallel is {tensor_parallel}; expected a divisor of the "
            f"{latent.query_heads} query heads"
        )
    import torch

    from deft_backend.hosts.common.described_latent import DescribedLatentServer

    return DescribedLatentServer(
        host, latent.query_heads // tensor_parallel, getattr(torch, latent.dtype), page_size,
        max_batch, 1 if drafts is None else drafts.query_tokens,
    )  # fmt: skip


def latent_text(described: DescribedLatentServer) -> str:
    """The server, for the line about its kernels."""
    tokens = described.query_tokens
    chains = f", chains of {tokens} query tokens" if tokens > 1 else ""
    return (
        f"latent attention of {described.num_query_heads} heads, {dtype_name(described.dtype)}, "
        f"pages of {described.page_size} on {described.host}{chains}"
    )
