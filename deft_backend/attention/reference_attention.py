"""The reference for every kernel: attention in plain PyTorch and float64, request by request."""

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
    query_start: torch.Tensor | None = None,
    ancestors: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each request's query tokens over its own tokens, without any sharing.

    - `q` [T, Hq, D]: the query tokens; ``T / B`` of each request without `query_start`.
    - `k_cache`, `v_cache` [pages, page_size, Hkv, D]: of any dtype, 8-bit ones included.
    - `page_table` [B, P] int, `seq_lens` [B] int.
    - `sm_scale`: default ``1 / sqrt(D)``. The others are as in :meth:`TreeAttention.run
      <deft_backend.TreeAttention.run>`.

    Returns [T, Hq, D] float64, on q's device; a query token that sees no token gets zeros.
    """
    _, heads, dim = q.shape
    batch = len(seq_lens)
    page_size, kv_heads = k_cache.shape[1:3]
    scale = 1.0 / math.sqrt(dim) if sm_scale is None else sm_scale
    out = torch.zeros(q.shape, dtype=torch.float64, device=q.device)
    starts = [b * len(q) // max(1, batch) for b in range(batch + 1)]
    if query_start is not None:
        starts = query_start.tolist()
    for b in range(batch):
        length = int(seq_lens[b])
        rows = slice(starts[b], starts[b + 1])
        tokens = starts[b + 1] - starts[b]
        position = torch.arange(length, device=q.device)
        page = page_table[b].long()[position // page_size]
        k = k_cache[page, position % page_size].double() * k_scale  # [length, Hkv, D]
        v = v_cache[page, position % page_size].double() * v_scale
        grouped = q[rows].double().view(tokens, kv_heads, heads // kv_heads, dim)
        scores = torch.einsum("thgd,nhd->thgn", grouped, k) * scale
        if logit_cap > 0.0:
            scores = logit_cap * torch.tanh(scores / logit_cap)
        seen = seen_tokens(tokens, length, None if ancestors is None else ancestors[b])
        scores = scores.masked_fill(~seen.to(q.device)[:, None, None, :], -math.inf)
        if sinks is not None:
            sink = sinks.double().view(kv_heads, -1, 1).expand(tokens, -1, -1, -1)
            scores = torch.cat([scores, sink], dim=-1)
        # NaN where a query token sees no token.
        weights = scores.softmax(-1)[..., :length].nan_to_num(0.0)
        out[rows] = torch.einsum("thgn,nhd->thgd", weights, v).reshape(tokens, heads, dim)
    return out


def seen_tokens(tokens: int, length: int, ancestors: torch.Tensor | None = None) -> torch.Tensor:
    """[tokens, length] bool: which tokens of a request its last `tokens` tokens see; by the bits of
    `ancestors` [tokens or more, words] int64, or as a chain.
    """
    token = torch.arange(length) - (length - tokens)  # from 0: a query token
    if ancestors is None:
        return token[None, :] <= torch.arange(tokens)[:, None]
    bits = ancestors.cpu()[:tokens]
    word = bits[:, token.clamp(min=0) // 64]
    return ((word >> (token.clamp(min=0) % 64)) & 1).bool() | (token < 0)


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """``||out - ref|| / ||ref||`` over the whole batch; NaN or inf where `out` has any."""
    norm = float(reference.double().norm())
    return float((out.double() - reference.double()).norm()) / max(norm, 1e-30)
