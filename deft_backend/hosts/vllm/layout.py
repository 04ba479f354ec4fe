"""Where keys and values lie in vLLM's KV cache."""

from __future__ import annotations

from typing import Any

import torch

_PROBE = (7, 16, 3, 64)  # blocks, tokens a block, KV heads, head dimension: all different


def has_packed_layout(backend: Any) -> bool:
    """Whether a backend's cache is ``[blocks, Hkv, block_size, 2 * D]``, keys before values.

    vLLM's standard since keys and values share the content dimension: FLASH_ATTN, FLASHINFER,
    TRITON_ATTN and FLEX_ATTENTION have it, in whatever order the dimensions lie in memory.
    """
    blocks, tokens, heads, dim = _PROBE
    try:
        shape = backend.get_kv_cache_shape(blocks, tokens, heads, dim)
    except Exception:
        return False
    return tuple(shape) == (blocks, heads, tokens, 2 * dim)


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
