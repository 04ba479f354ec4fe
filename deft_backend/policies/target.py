"""A policy's input beside the forest: the attention and the machine that it plans for."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

from deft_backend.costs.cost_model import CostModel, default_cost_model


@dataclass(frozen=True)
class Target:
    """The attention and the machine that a policy plans for.

    Attributes
    ----------
    num_query_heads, num_kv_heads, head_dim, dtype_bytes : int
        Shape of the attention; bytes of one element of the KV cache.
    num_programs : int
        Thread blocks that run at once for each KV head (about the number of SMs times the blocks
        an SM holds, over the KV heads).
    tile_heights : tuple of int
        Rows of the query tiles the kernels offer: ascending for groups of one range, and last the
        tile for groups of several. A row is one (query, query head of the GQA group) pair, so a
        tile of ``r`` rows serves ``r // gqa_group`` queries.
    tile_programs : tuple of int
        Thread blocks that run at once for each KV head, by tile shape.
    num_sms : int
        SMs of the GPU, which hold those thread blocks.
    tile_segments : tuple of int
        KV ranges that one item of each tile shape may have.
    block_tokens : int
        KV tokens a kernel loads at a time.
    max_groups, max_group_queries : int
        Most groups and most (group, query) pairs the plan's arrays can hold.
    cost_model : CostModel, optional
        Profiled costs of partial attention; None takes the table shipped with the package.
    """

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int = 2
    num_programs: int = 132
    tile_heights: tuple[int, ...] = (8, 64, 64)
    tile_programs: tuple[int, ...] = (132, 33, 33)
    num_sms: int = 132
    tile_segments: tuple[int, ...] = (1, 1, 32)
    block_tokens: int = 64
    max_groups: int = 1 << 30
    max_group_queries: int = 1 << 30
    cost_model: CostModel | None = field(default=None, compare=False)

    @property
    def costs(self) -> CostModel:
        """The cost model to plan with: `cost_model`, or the table shipped with the package."""
        return default_cost_model() if self.cost_model is None else self.cost_model

    @property
    def gqa_group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_query_heads // self.num_kv_heads

    @property
    def largest_tile(self) -> int:
        """Queries that the largest tile serves."""
        return max(self.tile_heights) // self.gqa_group

    @cached_property
    def single_range_tiles(self) -> tuple[int, ...]:
        """Queries that each tile shape for one KV range serves, ascending (0: none)."""
        single = zip(self.tile_queries, self.tile_segments, strict=True)
        return tuple(queries for queries, segments in single if segments == 1)

    @cached_property
    def tile_queries(self) -> tuple[int, ...]:
        """Queries that each tile shape serves, ascending."""
        return tuple(rows // self.gqa_group for rows in self.tile_heights)

    def within(self, max_groups: int, max_group_queries: int) -> Target:
        """The same target with no more groups and (group, query) pairs than given."""
        # Every plan asks for it, and `replace` takes longer than choosing the plan's ranges.
        found = object.__new__(type(self))
        found.__dict__.update(
            self.__dict__,
            max_groups=min(self.max_groups, max_groups),
            max_group_queries=min(self.max_group_queries, max_group_queries),
        )
        return found
