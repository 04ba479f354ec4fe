"""FlashInfer's MLA over each request alone: what SGLang's MLA backend ``flashinfer`` runs."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.kernel.methods.flashinfer_package import (
    flashinfer,
    flashinfer_origin,
    float_workspace,
)
from benchmarks.latent.latent_case import SCALE, LatentInputs
from deft_backend.shapes import ROPE_DIM, VALUE_DIM

_BACKEND = "fa3"  # the wrapper's choice on Hopper


def flashinfer_decode(inputs: LatentInputs) -> Callable[[], torch.Tensor]:
    """A planned run of ``BatchMLAPagedAttentionWrapper``, with buffers that a CUDA graph can hold.

    The wrapper plans on the CPU from the length of each request; a server does so in every step.
    """
    case, device = inputs.case, inputs.seq_lens.device
    requests, pages = inputs.page_table.shape
    numbers = torch.arange(requests + 1, dtype=torch.int32, device=device)
    where = {
        "qo_indptr": numbers * case.query_tokens,
        "kv_indptr": numbers * pages,
        "kv_indices": inputs.page_table.flatten(),
        "kv_len_arr": inputs.seq_lens,
    }
    wrapper = flashinfer().mla.BatchMLAPagedAttentionWrapper(
        float_workspace(device),
        use_cuda_graph=True,
        backend=_BACKEND,
        **{name: torch.empty_like(values) for name, values in where.items()},
    )
    wrapper.plan(
        **where,
        num_heads=case.heads,
        head_dim_ckv=VALUE_DIM,
        head_dim_kpe=ROPE_DIM,
        page_size=case.page_size,
        causal=case.query_tokens > 1,
        sm_scale=SCALE,
        q_data_type=inputs.q_nope.dtype,
        kv_data_type=inputs.cache.dtype,
    )
    cache, out = inputs.cache.squeeze(2), torch.empty_like(inputs.q_nope)

    def launch() -> torch.Tensor:
        wrapper.run(
            q_nope=inputs.q_nope,
            q_pe=inputs.q_rope,
            ckv_cache=cache[..., :VALUE_DIM],
            kpe_cache=cache[..., VALUE_DIM:],
            out=out,
        )
        return out

    return launch


def flashinfer_latent_origin() -> str:
    """The package and wrapper, for the header."""
    return f"{flashinfer_origin()}, BatchMLAPagedAttentionWrapper({_BACKEND})"
