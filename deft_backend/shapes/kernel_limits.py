"""The kernels' limits on one work item, which every plan must respect."""

from __future__ import annotations

TILE_NAMES = ("small tile", "large tile", "masked tile")
"""The glossary's names of the tile shapes, by number."""

TILE_HEIGHTS = (8, 64, 64)
"""Heights of stage 1's tiles (FastTree, multi-phase tiling), by tile shape. A tile of height ``h``
holds ``h`` query vectors, which are ``h // gqa_group`` queries. GQA groups of more than eight query
heads need a higher small tile."""

TILE_SEGMENTS = (1, 1, 32)
"""Most segments of one item, for each tile shape. Items of small and large tiles have one segment,
to which every query of the tile attends. Items of the masked tile have several and a span each."""

MAX_MERGED = 8  # most partial results that a small tile merges itself

MAX_TOKENS = 1 << 25
"""Longest context in tokens: the kernels keep shifts between positions in 26 bits."""

MAX_ITEM_TOKENS = 1 << 24
"""Most tokens of one item of the masked tile. Added to the longest context, positions still fit the
kernels' 26 bits."""

MAX_QUERY_TOKENS = 4096
"""Most query tokens of a request. Beyond a few hundred, prefill kernels serve better."""
