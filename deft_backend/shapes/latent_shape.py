"""The shape of multi-head latent attention (MLA)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deft_backend.shapes.latent_limits import LATENT_TILE_HEIGHT, ROPE_DIM, VALUE_DIM


@dataclass(frozen=True)
class LatentShape:
    """What stays the same for all batches of one MLA attention. All heads share one KV head.

    Attributes
    ----------
    num_query_heads : int
        Query heads of this rank.
    dtype : torch.dtype
        Of queries, KV cache and output.
    device : torch.device
    page_size : int
        Tokens of a page of the KV cache.
    value_dim, rope_dim : int
    """

    num_query_heads: int
    dtype: torch.dtype
    device: torch.device
    page_size: int
    value_dim: int = VALUE_DIM
    rope_dim: int = ROPE_DIM

    @property
    def latent_dim(self) -> int:
        """Elements that the KV cache holds of a token."""
        return self.value_dim + self.rope_dim

    def tile_queries(self, query_tokens: int) -> int:
        """Requests of so many query tokens that one tile holds."""
        return LATENT_TILE_HEIGHT // (self.num_query_heads * query_tokens)
