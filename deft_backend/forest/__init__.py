"""Forest: who shares what. Sources (page tables, radix tree) in, :class:`PrefixForest` out."""

from deft_backend.forest.prefix_forest import (
    VIRTUAL_ROOT,
    ForestError,
    Int32Array,
    PrefixForest,
    build_forest,
    forest_of_blocks,
)
from deft_backend.forest.sources import forest_from_page_tables, forest_from_paths

__all__ = [
    "VIRTUAL_ROOT",
    "ForestError",
    "Int32Array",
    "PrefixForest",
    "build_forest",
    "forest_from_page_tables",
    "forest_from_paths",
    "forest_of_blocks",
]
