"""A forest as JSON, from a server to the commands that show it."""

from __future__ import annotations

from typing import Any

import numpy as np

from deft_backend.forest import PrefixForest

_ARRAYS = (
    "order", "parent", "request", "start", "length", "query_begin", "query_end", "leaf", "seq_lens",
)  # fmt: skip


def forest_as_json(forest: PrefixForest) -> dict[str, Any]:
    """What :func:`forest_from_json` reads."""
    arrays = {name: getattr(forest, name).tolist() for name in _ARRAYS}
    return {**arrays, "page_size": forest.page_size}


def forest_from_json(content: dict[str, Any]) -> PrefixForest:
    """The forest; raises KeyError, TypeError or ValueError if it is none."""
    arrays = {name: np.asarray(content[name], dtype=np.int32) for name in _ARRAYS}
    return PrefixForest(page_size=int(content["page_size"]), **arrays)
