"""Attention in plain torch: prefill, and decode query by query, which tree attention replaces."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from examples.page_table_engine.cache import PagedCache


class DecodeBatch(NamedTuple):
    """A decode step's static tensors on the device; requests of length 0 are padding.

    Attributes
    ----------
    page_table : [rows, P] int32
        The engine's page table: page ids by position. Equal prefixes have equal pages at equal
        positions.
    table_rows : [B] int64
        Row of the page table of each request.
    seq_lens : [B] int64
        Tokens of each request, including the token being decoded.
    """

    page_table: torch.Tensor
    table_rows: torch.Tensor
    seq_lens: torch.Tensor


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal attention of the last T of N tokens: q [T, Hq, D], k and v [N, Hkv, D]."""
    mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(len(k) - len(q))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # heads come before tokens
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return out[0].transpose(0, 1)


def decode(q: torch.Tensor, cache: PagedCache, layer: int, batch: DecodeBatch) -> torch.Tensor:
    """Attention [B, Hq, D] of one query for each request, over its own KV; 0 for padding."""
    out = torch.zeros_like(q)
    rows, lens = batch.table_rows.tolist(), batch.seq_lens.tolist()
    for index, (row, length) in enumerate(zip(rows, lens, strict=True)):
        if length:
            k, v = cache.read(layer, batch.page_table[row], length)
            out[index] = attend(q[index : index + 1], k, v)[0]
    return out
