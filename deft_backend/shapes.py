"""The shape of an attention: heads, dtypes, query blocks, and the limits of the kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


TILE_NAMES = ("small tile", "large tile", "masked tile")
"""The glossary's names of the tile shapes, by number."""

TILE_HEIGHTS = (8, 64, 64)
"""Heights of stage 1's tiles (FastTree, multi-phase tiling), by tile shape. A tile of height ``h``
holds ``h`` query vectors, which are ``h // gqa_group`` queries. GQA groups of more than eight query
heads need a higher small tile."""

TILE_SEGMENTS = (1, 1, 32)
"""Most segments of an item of each tile shape; `ORDERED` has one. Every query of a small or large
tile attends to its one segment. Items of the masked tile have several and a span each."""

ORDERED = 3
"""The tile shape of `invariant` alone that has a small tile's height and the large tile's bits."""

MAX_MERGED = 8  # most partial results that a small tile merges itself

MAX_TOKENS = 1 << 25
"""Longest context in tokens: the kernels keep shifts between positions in 26 bits."""

MAX_ITEM_TOKENS = 1 << 24
"""Most tokens of one item of the masked tile. Added to the longest context, positions still fit the
kernels' 26 bits."""

MAX_QUERY_TOKENS = 4096
"""Most query tokens of a request. Beyond a few hundred, prefill kernels serve better."""


class QueryBlocks(NamedTuple):
    """Up to `query_tokens` query tokens of a request, in `blocks` blocks of up to `tokens` tokens.

    Decode has one query token a request. Verification of a draft has one for each drafted token and
    one for the token before them. A plan's *query* is a query block: the query vectors of all its
    tokens fill one tile, so they read KV together. The last block of a request may be shorter.
    """

    query_tokens: int
    blocks: int
    tokens: int

    @classmethod
    def of(cls, query_tokens: int, gqa_group: int) -> QueryBlocks:
        """As few blocks as the largest tile allows, all about equally long.

        `gqa_group` query heads share a KV head.
        """
        held = max(1, max(TILE_HEIGHTS) // gqa_group)
        blocks = -(-query_tokens // held)
        tokens = -(-query_tokens // blocks)
        return cls(query_tokens, -(-query_tokens // tokens), tokens)

    @classmethod
    def most_tokens(cls, query_tokens: int, gqa_group: int) -> int:
        """Most tokens of a block, if requests have at most `query_tokens` query tokens."""
        return min(query_tokens, max(1, max(TILE_HEIGHTS) // gqa_group))

    @property
    def private_tokens(self) -> int:
        """Last tokens of a request that no other request's queries may read with it.

        These are its query tokens, because not every query token sees all of them. A single query
        token sees its whole request, so in decode there are none.
        """
        return self.query_tokens if self.query_tokens > 1 else 0


ONE_TOKEN = QueryBlocks(1, 1, 1)  # decode


DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""Bytes of an element of the KV cache, by its dtype."""

SHORT_DTYPES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32"}
"""Names of dtypes on the command line."""

EIGHT_BIT_CACHES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""Hosts' names for KV caches of 8 bits with one scale for all keys and one for all values, and
torch's names for their dtypes."""


@dataclass(frozen=True)
class AttentionShape:
    """What stays the same for all batches of one attention."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of queries and output
    kv_dtype: torch.dtype  # of the KV cache
    device: torch.device
    page_size: int  # tokens of a page of the KV cache

    @property
    def gqa_group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_query_heads // self.num_kv_heads


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
