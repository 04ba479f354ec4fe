"""Float64 attention for whole batches: the reference for every timed result.

It computes the formula of :mod:`deft_backend.reference_attention` from the page tables alone. It
handles many requests at a time, and one block of tokens after another. So a batch of a million
tokens takes a fraction of a second on a GPU, and bounded memory.
"""

from __future__ import annotations

import math

import torch

_TILE_TOKENS = 4096
_TILE_BYTES = 1 << 30
_LOWEST = -1e300  # -inf would give NaN for a request without tokens


def batched_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    seen: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of each request over its whole context, without sharing.

    Parameters
    ----------
    q : [B, Hq, D]; with `seen`, [B * n, Hq, D]
    k_cache, v_cache : [pages, page_size, Hkv, D]
    page_table : [B, P] int
    seq_lens : [B] int
    seen : [n, n] bool, optional
        Which of a request's last n tokens, its query tokens, each of these sees.

    Returns
    -------
    [B, Hq, D] float64, on q's device; a request without tokens gets zeros. With `seen`, for each
    query token.
    """
    batch, heads, dim = q.shape
    own = None
    if seen is not None:  # each query token is a request of its own
        own = seen.to(q.device).repeat(len(seq_lens), 1)
        page_table = page_table.repeat_interleave(len(seen), 0)
        seq_lens = seq_lens.repeat_interleave(len(seen))
    kv_heads = k_cache.shape[2]
    out = torch.zeros((batch, heads, dim), dtype=torch.float64, device=q.device)
    by_length = torch.argsort(seq_lens)  # neighbours have similar lengths, so padding stays small
    lengths = seq_lens[by_length].tolist()
    end = batch
    while end:
        longest = max(1, lengths[end - 1])
        tile = min(longest, _TILE_TOKENS)
        rows = max(1, _TILE_BYTES // (tile * kv_heads * dim * 8))
        begin = max(0, end - rows)
        chosen = by_length[begin:end]
        out[chosen] = _attend(
            q[chosen], k_cache, v_cache, page_table[chosen], seq_lens[chosen],
            None if own is None else own[chosen], longest, tile,
        )  # fmt: skip
        end = begin
    return out


def _attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    own: torch.Tensor | None,
    longest: int,
    tile: int,
) -> torch.Tensor:
    """Attention of some requests, with a running maximum over tiles of tokens."""
    batch, heads, dim = q.shape
    page_size, kv_heads = k_cache.shape[1:3]
    grouped = q.double().view(batch, kv_heads, heads // kv_heads, dim) / math.sqrt(dim)
    top = torch.full_like(grouped[..., 0], _LOWEST)
    total = torch.zeros_like(top)
    weighted = torch.zeros_like(grouped)
    for start in range(0, longest, tile):
        position = torch.arange(start, min(start + tile, longest), device=q.device)
        attended = position < seq_lens[:, None]
        if own is not None:
            token = position - (seq_lens[:, None] - own.shape[1])
            attended &= (token < 0) | own.gather(1, token.clamp(0, own.shape[1] - 1))
        page = page_table[:, position // page_size].long().where(attended, 0)
        place = (position % page_size).expand_as(page)
        scores = torch.einsum("bhgd,bthd->bhgt", grouped, k_cache[page, place].double())
        scores.masked_fill_(~attended[:, None, None, :], -math.inf)
        new_top = torch.maximum(top, scores.amax(-1))
        weights = torch.exp(scores - new_top[..., None])
        keep = torch.exp(top - new_top)
        total = total * keep + weights.sum(-1)
        weighted = weighted * keep[..., None] + torch.einsum(
            "bhgt,bthd->bhgd", weights, v_cache[page, place].double()
        )
        top = new_top
    total = total.clamp(min=torch.finfo(torch.float64).tiny)
    return (weighted / total[..., None]).view(batch, heads, dim)
