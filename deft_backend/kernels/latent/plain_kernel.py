"""A stand-in for the host's MLA kernel, in plain PyTorch: for tests and for the CPU."""

from __future__ import annotations

import torch

from deft_backend.kernels.latent.kernel_batch import LatentCall


def plain_latent_attention(call: LatentCall) -> tuple[torch.Tensor, torch.Tensor]:
    """Entry by entry; rows of no entry hold NaN, as a kernel may leave them."""
    tokens, heads, value_dim = call.q_nope.shape
    out = torch.full_like(call.q_nope, float("nan"))
    lse = torch.full((heads, tokens), float("nan"), dtype=torch.float32, device=out.device)
    q = torch.cat([call.q_nope, call.q_rope], dim=-1).float()
    latents = call.cache.reshape(-1, call.cache.shape[-1])
    page_size = call.cache.shape[1]
    start, rows, begin, end = (part.tolist() for part in call.batch)
    for i, row in enumerate(rows):
        first, stop = start[i], start[i + 1]
        if first == stop:
            continue
        position = torch.arange(begin[i], end[i], device=out.device)
        page = call.page_table[row, position // page_size].long()
        kv = latents[page * page_size + position % page_size].float()
        scores = torch.einsum("thd,kd->htk", q[first:stop], kv) * call.sm_scale
        if call.causal:
            last = end[i] - (stop - first) + torch.arange(stop - first, device=out.device)
            scores.masked_fill_(position[None, None, :] > last[None, :, None], float("-inf"))
        sums = torch.logsumexp(scores, dim=-1)
        lse[:, first:stop] = sums
        weights = torch.exp(scores - sums.where(sums.isfinite(), 0.0)[..., None])
        found = torch.einsum("htk,kd->thd", weights, kv[:, :value_dim])
        out[first:stop] = found.to(out.dtype)
    return out, lse
