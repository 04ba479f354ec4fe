"""A forest as JSON, from a server to the commands that show it."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from deft_backend.files.json_fields import FieldError, whole, whole_numbers
from deft_backend.forest import PrefixForest, build_forest

_NODES = ("parent", "request", "start", "length", "query_begin", "query_end", "leaf")
_ARRAYS = ("order", "seq_lens", *_NODES)


def forest_as_json(forest: PrefixForest) -> dict[str, Any]:
    """What :func:`forest_from_json` reads."""
    arrays = {name: getattr(forest, name).tolist() for name in _ARRAYS}
    return {**arrays, "page_size": forest.page_size}


def forest_from_json(content: Mapping[str, Any]) -> PrefixForest:
    """The forest; compiled code follows its indices, so all of them must fit each other.

    Raises ValueError if the content holds no forest; the message names a field.
    """
    arrays = {name: whole_numbers(content, name) for name in _ARRAYS}
    order, seq_lens = arrays["order"], arrays["seq_lens"]
    nodes = len(arrays["parent"])
    for name in _NODES[:-1]:
        if len(arrays[name]) != nodes or nodes > 2 * len(order):
            raise FieldError(
                f"{name} has {len(arrays[name])} nodes; expected {nodes}, at most two a request"
            )
    # Neighbours share the tokens up to the end of the smallest node that holds both of them.
    shared = np.zeros(max(0, len(order) - 1), dtype=np.int64)
    ends = arrays["start"].astype(np.int64) + arrays["length"]
    for first, stop, end in zip(arrays["query_begin"], arrays["query_end"], ends, strict=True):
        both = shared[max(first, 0) : max(int(stop) - 1, 0)]
        np.maximum(both, end, out=both)
    page_size = whole(content, "page_size", least=1, most=(1 << 31) - 1)
    shared = np.clip(shared, 0, (1 << 31) - 1)
    forest = build_forest(order, shared.astype(np.int32), seq_lens, page_size)
    for name in _NODES:
        if not np.array_equal(arrays[name], getattr(forest, name)):
            raise FieldError(f"{name} does not fit order and seq_lens")
    return forest
