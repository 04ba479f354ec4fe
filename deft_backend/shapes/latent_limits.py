"""Sizes of multi-head latent attention (MLA), and the tile of the hosts' kernel for it."""

from __future__ import annotations

VALUE_DIM = 512
"""Elements of a token's latent vector: its value, and the part of its key without position."""

ROPE_DIM = 64
"""Elements of a token's key that carry its position."""

LATENT_TILE_HEIGHT = 64
"""Query vectors that the host's kernel computes together."""


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
