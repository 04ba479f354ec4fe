"""The second input of a policy: the attention and the GPU that it plans for, and their limits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deft_backend.costs.cost_model import CostModel, default_cost_model
from deft_backend.shapes import TILE_HEIGHTS, TILE_SEGMENTS

TILE_BLOCKS = (16, 64, 64)
"""Tokens that the Hopper kernels of each tile shape read at a time, of a cache of 16 bits."""


class PolicyError(ValueError):
    """The policy is unknown, or it cannot work with the given parameters."""


class DoesNotFit(PolicyError):
    """The policy makes more of this batch than the plan's arrays hold."""


class Limits(NamedTuple):
    """Most items, (item, query) pairs and KV ranges of a plan."""

    items: int
    entries: int
    segments: int


UNLIMITED = Limits(1 << 30, 1 << 30, 1 << 30)


@dataclass(frozen=True)
class Target:
    """The attention and the GPU that a policy plans for."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int = 2  # bytes of one element of the KV cache
    num_programs: int = 132
    """Programs that run at once for each KV head: SMs times programs of an SM, by the KV heads."""
    tile_heights: tuple[int, ...] = TILE_HEIGHTS
    """Query vectors that each tile shape holds: ascending for tiles of one segment, and last the
    masked tile. A tile of height ``h`` serves ``h // query_vectors`` queries."""
    tile_programs: tuple[int, ...] = (132, 33, 33)
    """Programs that run at once for each KV head, by tile shape."""
    fewer_programs: tuple[tuple[int, int], ...] = ()
    """The same for the first tile shape in a small batch: the most queries of the batch, and the
    programs, ascending."""
    num_sms: int = 132
    tile_segments: tuple[int, ...] = TILE_SEGMENTS  # most segments of one item, by tile shape
    block_tokens: int = 64  # tokens of a KV block, in which chunks are counted
    tile_blocks: tuple[int, ...] = TILE_BLOCKS
    """Tokens that the kernel of each tile shape reads at a time."""
    ordered_height: int = 0
    """Query vectors that the ordered tile holds, which `invariant` alone uses; 0: there is none."""
    ordered_from: int = 0  # queries of the smallest batch that it pays for
    limits: Limits = UNLIMITED  # what the plan's arrays can hold
    query_tokens: int = 1
    query_blocks: int = 1
    """A query of the plan is a block of up to `query_tokens` query tokens of a request, which has
    `query_blocks` of them. Decode has one token in one block."""
    cost_model: CostModel | None = field(default=None, compare=False)
    """Measured costs of partial attention; None for the table shipped with the package."""

    @property
    def costs(self) -> CostModel:
        """The cost model to plan with: `cost_model`, or the table shipped with the package."""
        return default_cost_model() if self.cost_model is None else self.cost_model

    def programs_for(self, queries: int) -> tuple[int, ...]:
        """`tile_programs` in a batch of so many queries."""
        for most, programs in self.fewer_programs:
            if queries <= most:
                return (programs, *self.tile_programs[1:])
        return self.tile_programs

    def ordered_queries(self, queries: int) -> int:
        """Queries that the ordered tile serves in a batch of so many; 0: the batch has none."""
        return self.ordered_height // self.query_vectors if queries >= self.ordered_from else 0

    @property
    def gqa_group(self) -> int:
        return self.num_query_heads // self.num_kv_heads

    @property
    def query_vectors(self) -> int:
        """Query vectors of one query that share a KV head: of its tokens and their GQA groups."""
        return self.query_tokens * self.gqa_group

    @property
    def largest_tile(self) -> int:
        """Queries that the largest tile serves."""
        return max(self.tile_heights) // self.query_vectors

    @property
    def partial_ns(self) -> float:
        """Time of the whole GPU to write and merge one query's partial result, all heads."""
        return self.query_tokens * self.costs.tiles.partial_ns

    def tile_costs(self) -> npt.NDArray[np.float64]:
        """[2 T + 2] nanoseconds: `item_ns` and `token_ns` of each single-segment tile shape, then
        `partial_ns` and `reduce_ns` (:class:`~deft_backend.costs.TileCosts`).

        Raises PolicyError for a cost table of other tile shapes.
        """
        costs, shapes = self.costs.tiles, len(self.single_range_tiles)
        if len(costs.item_ns) != shapes:
            raise PolicyError(
                f"the cost table holds {len(costs.item_ns)} tile shapes; expected {shapes}: "
                f"measure this version's kernels with `deft tune` (table: {self.costs.source})"
            )
        return np.array([*costs.item_ns, *costs.token_ns, self.partial_ns, costs.reduce_ns])

    @cached_property
    def transfer_ns(self) -> float:
        """Time in which the GPU's memory delivers one token of all KV heads."""
        token = 2 * self.head_dim * self.dtype_bytes * self.num_kv_heads
        return self.costs.transfer_ms(token) * 1e6

    def estimates(self) -> npt.NDArray[np.float64]:
        """[T, K] nanoseconds of an item of each single-segment tile shape, by profiled length; a
        tile computes all of its query vectors, so its height is FlashForge's ``n_q``.
        """
        heights = [[height] for height in self.tile_heights[:-1]]
        return self.costs.time(np.array(heights), self.costs.tokens) * 1e6

    @property
    def single_range_tiles(self) -> tuple[int, ...]:
        """Queries that each tile shape of one segment serves, ascending (0: none)."""
        return self.tile_queries[:-1]

    @cached_property
    def tile_queries(self) -> tuple[int, ...]:
        """Queries that each tile shape serves, ascending."""
        return tuple(height // self.query_vectors for height in self.tile_heights)

    def within(self, limits: Limits) -> Target:
        """The same target with no more items, (item, query) pairs and KV ranges than given."""
        return replace(self, limits=Limits(*map(min, self.limits, limits)))


def check_limits(policy: str, needed: Limits, target: Target) -> None:
    """Raise DoesNotFit for more items, (item, query) pairs or KV ranges than `target` allows."""
    names = ("items", "(item, query) pairs", "KV ranges")
    for what, held, limit in zip(names, needed, target.limits, strict=True):
        if held > limit:
            raise DoesNotFit(
                f"{policy} makes {held} {what} of this batch and the plan holds {limit}; "
                "raise the plan's capacity or choose flash-decoding"
            )
