"""Float64 attention for whole batches: the reference for every timed result.

It computes the formula of :mod:`deft_backend.attention.reference_attention` from the page tables
alone. It handles many requests at a time, and one block of tokens after another. So a batch of a
million tokens takes a fraction of a second on a GPU, and bounded memory.
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

    - `q`: [B, Hq, D]; with `seen`, [B * n, Hq, D]
    - `k_cache, v_cache`: [pages, page_size, Hkv, D]
    - `page_table`: [B, P] int
    - `seq_lens`: [B] int
    - `seen`: [n, n] bool. Which of a request's last n tokens, its query tokens, each of these sees.

    Returns [B, Hq, D] float64, or that of each query token; a request without tokens gets zeros.
    """
    if seen is not None:  # as if the heads of a request's query tokens were heads of one query
        wide = _as_heads(q, len(seq_lens), k_cache.shape[2])
        found = _one_query_each(wide, k_cache, v_cache, page_table, seq_lens, seen)
        return _as_tokens(found, len(seen), k_cache.shape[2])
    return _one_query_each(q, k_cache, v_cache, page_table, seq_lens, None)


def _one_query_each(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    seen: torch.Tensor | None,
) -> torch.Tensor:
    """The same for one query of each request, whose heads are those of all query tokens."""
    batch, heads, dim = q.shape
    kv_heads = k_cache.shape[2]
    out = torch.zeros((batch, heads, dim), dtype=torch.float64, device=q.device)
    by_length = torch.argsort(seq_lens)  # neighbours have similar lengths, so padding stays small
    lengths = seq_lens[by_length].tolist()
    end = batch
    while end:
        longest = max(1, lengths[end - 1])
        tile = min(longest, _TILE_TOKENS)
        rows = max(1, _TILE_BYTES // (tile * max(kv_heads * dim, heads) * 8))
        begin = max(0, end - rows)
        chosen = by_length[begin:end]
        out[chosen] = _attend(
            q[chosen], k_cache, v_cache, page_table[chosen], seq_lens[chosen], seen, longest, tile
        )
        end = begin
    return out


def _attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    seen: torch.Tensor | None,
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
        visible = attended[:, None, :]
        if seen is not None:
            token = position - (seq_lens[:, None] - len(seen))
            own = seen.to(q.device).t()[token.clamp(0, len(seen) - 1)]  # [B, t, n]
            visible = visible & ((token < 0)[:, None, :] | own.transpose(1, 2))
            visible = visible.repeat_interleave(grouped.shape[2] // len(seen), 1)
        page = page_table[:, position // page_size].long().where(attended, 0)
        place = (position % page_size).expand_as(page)
        keys = _tokens_at(k_cache, page, place)
        scores = torch.einsum("bhgd,bthd->bhgt", grouped, keys)
        scores.masked_fill_(~visible[:, None], -math.inf)
        new_top = torch.maximum(top, scores.amax(-1))
        weights = torch.exp(scores - new_top[..., None])
        keep = torch.exp(top - new_top)
        total = total * keep + weights.sum(-1)
        weighted = weighted * keep[..., None] + torch.einsum(
            "bhgt,bthd->bhgd", weights, _tokens_at(v_cache, page, place)
        )
        top = new_top
    total = total.clamp(min=torch.finfo(torch.float64).tiny)
    return (weighted / total[..., None]).view(batch, heads, dim)


def _tokens_at(cache: torch.Tensor, page: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """[B, t, Hkv, D] float64: tokens of a cache; of 8 bits, indexed as bytes."""
    if cache.itemsize == 1:
        return cache.view(torch.uint8)[page, place].view(cache.dtype).double()
    return cache[page, place].double()


def _as_heads(q: torch.Tensor, batch: int, kv_heads: int) -> torch.Tensor:
    """[B, Hkv * n * group, D] of [B * n, Hq, D]."""
    by_head = q.view(batch, -1, kv_heads, q.shape[1] // kv_heads, q.shape[2])
    return by_head.transpose(1, 2).reshape(batch, -1, q.shape[2])


def _as_tokens(out: torch.Tensor, tokens: int, kv_heads: int) -> torch.Tensor:
    """[B * n, Hq, D] of [B, Hkv * n * group, D]."""
    by_head = out.view(len(out), kv_heads, tokens, -1, out.shape[2]).transpose(1, 2)
    return by_head.reshape(len(out) * tokens, -1, out.shape[2])
