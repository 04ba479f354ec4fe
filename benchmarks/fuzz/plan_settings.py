"""The shapes that plans without attention are made for, each by its number."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from deft_backend.policies import Target
from deft_backend.shapes import QueryBlocks

HEADS = ((32, 8), (8, 2), (16, 1), (28, 4), (32, 32), (12, 1))
PAGE_SIZES = (1, 16, 64, 5)
TILES = ((8, 64, 64), (16, 48, 32), (8, 24, 12))
QUERY_TOKENS = (1, 1, 4, 1, 70)


@dataclass(frozen=True)
class PlanSetting:
    """What a plan without attention is made for.

    - `programs`: programs that run at once for each KV head.
    - `tiles`: heights of the tiles in query vectors.
    - `block_tokens`: tokens of a KV block.
    - `query_tokens`: of each request.
    - `fewer`: whether small batches run fewer programs of the small tile.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    programs: int
    tiles: tuple[int, ...]
    block_tokens: int
    query_tokens: int = 1
    fewer: bool = False

    @property
    def blocks(self) -> QueryBlocks:
        """The query blocks of each request."""
        return QueryBlocks.of(self.query_tokens, self.query_heads // self.kv_heads)

    @property
    def fits(self) -> bool:
        """Whether a large and a masked tile hold the query vectors of one query."""
        vectors = self.blocks.tokens * (self.query_heads // self.kv_heads)
        return min(self.tiles[1:]) >= vectors

    def target(self) -> Target:
        """The target of policies and planners."""
        return Target(
            num_query_heads=self.query_heads, num_kv_heads=self.kv_heads, head_dim=self.head_dim,
            num_programs=self.programs, tile_heights=self.tiles,
            tile_programs=(4 * self.programs, self.programs, self.programs),
            fewer_programs=((16, self.programs), (64, 2 * self.programs)) if self.fewer else (),
            block_tokens=self.block_tokens, query_tokens=self.blocks.tokens,
            query_blocks=self.blocks.blocks,
        )  # fmt: skip


def plan_settings() -> list[PlanSetting]:
    """Every setting of plans, the common ones first."""
    choices = itertools.product(TILES, (132, 33, 5), PAGE_SIZES, HEADS, (64, 1 << 15, 16))
    every = (
        PlanSetting(*heads, 128, page_size, programs, tiles, block, query_tokens, fewer)
        for (tiles, programs, page_size, heads, block), query_tokens, fewer in zip(
            choices, itertools.cycle(QUERY_TOKENS), itertools.cycle((False, True)), strict=False
        )
    )
    return [setting for setting in every if setting.fits]
