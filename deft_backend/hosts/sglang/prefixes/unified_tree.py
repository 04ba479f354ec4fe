"""The forest of a decode batch, read from SGLang's unified radix tree."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deft_backend.forest import PrefixForest, forest_from_tree
from deft_backend.hosts.sglang.prefixes.plain_tree import ROOT, TreeError
from deft_backend.hosts.sglang.versions import TreePaths, place_of


class UnifiedTreeSource:
    """Reads paths of the tree; its core is in Rust or in Python.

    - `paths`: Lists the nodes on the path from the root to each given node.
    """

    def __init__(self, paths: TreePaths) -> None:
        self._paths = paths

    def forest(self, requests: Sequence[Any], seq_lens: npt.NDArray[np.integer]) -> PrefixForest:
        """Forest of a decode batch.

        A request's path is cut to what the tree owns of the request, and to ``seq_len - 1``
        tokens. A cut node differs from the whole node.

        Raises TreeError if tokens on a path are not on the device, or a node does not start where
        its parent ends.
        """
        parent, depth = [ROOT], [0]
        index: dict[tuple[int, int], int] = {}
        held = [_held(request) for request in requests]
        ends = list({node: None for node, _ in held if node is not None})
        paths = dict(zip(ends, self._paths(ends) if ends else (), strict=True))
        holder = []
        for (end, owned), length in zip(held, seq_lens.tolist(), strict=True):
            node = ROOT
            shared = min(owned, length - 1)
            for part in paths[end] if end is not None else ():
                if part.path_start >= shared:
                    break
                if part.path_start != depth[node]:
                    raise TreeError(
                        f"node {part.node_id} of the radix tree starts at token "
                        f"{part.path_start}, its parent ends at {depth[node]}"
                    )
                if part.full_value_len != part.path_end - part.path_start:
                    raise TreeError(
                        f"node {part.node_id} of the radix tree has {part.full_value_len} of its "
                        f"{part.path_end - part.path_start} tokens on the device"
                    )
                until = min(part.path_end, shared)
                key = (part.node_id, until)
                below = index.get(key)
                if below is None:
                    below = index[key] = len(parent)
                    parent.append(node)
                    depth.append(until)
                node = below
            holder.append(node)
        return forest_from_tree(parent, depth, holder, seq_lens)


def _held(request: Any) -> tuple[int | None, int]:
    """The node at the end of a request's path, and the tokens that the tree owns of it."""
    row, owned = place_of(request)
    return (None, 0) if row is None else (request.last_node, owned)
