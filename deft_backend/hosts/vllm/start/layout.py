"""The position of keys and values in vLLM's KV cache."""

from __future__ import annotations

import torch


def kv_views(kv_cache: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of one layer, as :meth:`TreeAttention.run` takes them; nothing is copied.

    Parameters
    ----------
    kv_cache : [pages, Hkv, page_size, 2 * D]
        In any memory order with a contiguous last dimension (NHD or HND, padded pages, layers
        side by side).
    head_dim : int
        D.

    Returns
    -------
    k_cache, v_cache : [pages, page_size, Hkv, D]
    """
    paged = kv_cache.transpose(1, 2)
    return paged[..., :head_dim], paged[..., head_dim:]
