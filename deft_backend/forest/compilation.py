"""Compiles the functions that build forests, before the first request needs them."""

import numpy as np

from deft_backend.forest.page_tables import forest_from_page_tables
from deft_backend.forest.radix_tree import forest_from_paths


def warm_up() -> None:
    """Compile the code that builds forests (seconds), or load it from the cache (milliseconds).

    Page tables may be int32 or int64, contiguous or rows of a larger table.
    """
    for dtype in (np.int32, np.int64):
        wide = np.zeros((2, 4), dtype=dtype)
        for tables in (wide, wide[:, :2]):
            forest_from_page_tables(tables, [2, 1])
    forest = forest_from_paths([[("a", 1)], [("a", 1)]], [1, 2])
    _ = forest.depth
