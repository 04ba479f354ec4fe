"""The reference for every kernel: attention in plain PyTorch and float64, request by request."""

from __future__ import annotations

import math

import torch


def reference_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Decode attention of each request over its own tokens, without any sharing.

    Parameters
    ----------
    q : [B, Hq, D]
    k_cache, v_cache : [pages, page_size, Hkv, D]
        Of any dtype, 8-bit ones included.
    page_table : [B, P] int
    seq_lens : [B] int
    sm_scale : float, optional
        Default ``1 / sqrt(D)``.
    logit_cap : float
        Soft cap of the scores; 0 for none.
    k_scale, v_scale : float
        What a stored key and a stored value are multiplied with.
    sinks : [Hq], optional
        A score of each query head that has no value.

    Returns
    -------
    [B, Hq, D] float64, on q's device; a request without tokens gets zeros.
    """
    batch, heads, dim = q.shape
    page_size, kv_heads = k_cache.shape[1:3]
    scale = 1.0 / math.sqrt(dim) if sm_scale is None else sm_scale
    out = torch.zeros((batch, heads, dim), dtype=torch.float64, device=q.device)
    for b in range(batch):
        length = int(seq_lens[b])
        if length == 0:
            continue
        position = torch.arange(length, device=q.device)
        page = page_table[b].long()[position // page_size]
        k = k_cache[page, position % page_size].double() * k_scale  # [length, Hkv, D]
        v = v_cache[page, position % page_size].double() * v_scale
        grouped = q[b].double().view(kv_heads, heads // kv_heads, dim)
        scores = torch.einsum("hgd,nhd->hgn", grouped, k) * scale
        if logit_cap > 0.0:
            scores = logit_cap * torch.tanh(scores / logit_cap)
        if sinks is not None:
            sink = sinks.double().view(kv_heads, -1, 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = scores.softmax(-1)[..., :length]
        out[b] = torch.einsum("hgn,nhd->hgd", weights, v).reshape(heads, dim)
    return out


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """``||out - ref|| / ||ref||`` over the whole batch; NaN or inf where `out` has any."""
    norm = float(reference.double().norm())
    return float((out.double() - reference.double()).norm()) / max(norm, 1e-30)
