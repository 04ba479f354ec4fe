"""What one work item may hold: the limits of the kernels that every plan must respect."""

from __future__ import annotations

TILE_ROWS = (8, 64, 64)
"""Rows of each query tile that stage 1 has a kernel for (FastTree, multi-phase tiling): the small
tile, the large tile, and the tile for several KV ranges. A row of a tile is one (query, query head
of its GQA group) pair. GQA groups of more than eight heads need a larger small tile."""

TILE_SEGMENTS = (1, 1, 32)
"""Most KV ranges of one item of each tile shape. All shapes but the last take one range, to which
every query of the tile attends; the last takes several and masks."""

MAX_MERGED = 8
"""Most partial results that an item of the small tile merges itself."""

MAX_TOKENS = 1 << 25
"""Longest context in tokens: the kernels keep shifts between positions in 26 bits."""

MAX_ITEM_TOKENS = 1 << 24
"""Most tokens of one item of several KV ranges: added to the longest context, positions still fit
the kernels' 26 bits."""
