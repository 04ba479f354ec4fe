"""The shape of multi-head latent attention (MLA), and the tile of the hosts' kernel for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

VALUE_DIM = 512
"""Elements of a token's latent vector: its value, and the part of its key without position."""

ROPE_DIM = 64
"""Elements of a token's key that carry its position."""

LATENT_TILE_HEIGHT = 64
"""Query vectors that the host's kernel computes together."""


@dataclass(frozen=True)
class LatentShape:
    """What stays the same for all batches of one MLA attention. All heads share one KV head."""

    num_query_heads: int  # of this rank
    dtype: torch.dtype  # of queries, KV cache and output
    device: torch.device
    page_size: int  # tokens of a page of the KV cache
    value_dim: int = VALUE_DIM
    rope_dim: int = ROPE_DIM

    @property
    def latent_dim(self) -> int:
        """Elements that the KV cache holds of a token."""
        return self.value_dim + self.rope_dim

    def tile_queries(self, query_tokens: int) -> int:
        """Requests of so many query tokens that one tile holds."""
        return LATENT_TILE_HEIGHT // (self.num_query_heads * query_tokens)


def gains_nothing(num_query_heads: int, query_tokens: int) -> str | None:
    """Why sharing cannot make this attention faster, in one line, or None."""
    rows = num_query_heads * query_tokens
    if 2 * rows <= LATENT_TILE_HEIGHT:
        return None
    return (
        f"{rows} query vectors a request ({num_query_heads} heads, {query_tokens} query tokens) "
        f"leave no room for another request in a tile of {LATENT_TILE_HEIGHT}: sharing would gain "
        "nothing"
    )
