"""How a range's queries divide into tiles, as every kernel of the device planner computes it."""

from __future__ import annotations

import triton.language as tl
from triton import jit


@jit
def tiles_of(queries, small_tile, large_tile):
    """Whether each range's queries need large tiles, and how many tiles they fill.

    `small_tile` and `large_tile` are the queries that a tile holds. A small tile holds 0 queries if
    the GQA group is larger than the tile; then every range needs large tiles.
    """
    is_large = queries > small_tile
    held = tl.where(is_large, large_tile, tl.maximum(small_tile, 1))
    return is_large, (queries + held - 1) // held


@jit
def total(values):
    """Sum of all values."""
    return tl.reduce(values, 0, tl.standard._sum_combine)
