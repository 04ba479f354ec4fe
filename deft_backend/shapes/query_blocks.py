"""Query blocks: how a request's query tokens divide into the queries of a plan."""

from __future__ import annotations

from typing import NamedTuple

from deft_backend.shapes.kernel_limits import TILE_HEIGHTS


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
