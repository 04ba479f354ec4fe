"""The forest of a decode batch, read from the nodes of SGLang's radix trees."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deft_backend.forest import PrefixForest, forest_from_tree
from deft_backend.hosts.sglang.versions import TreePaths, place_of

ROOT = 0  # the root among the nodes that a reader has seen


class TreeError(ValueError):
    """A radix tree with an unexpected structure."""


class RadixTreeSource:
    """Walks from each request's last node to the root, by the nodes' ``parent`` and ``key``."""

    def forest(self, requests: Sequence[Any], seq_lens: npt.NDArray[np.integer]) -> PrefixForest:
        """Forest of a decode batch.

        A request's path through the tree is cut to what the tree owns of the request, and to
        ``seq_len - 1`` tokens. A cut node differs from the whole node.

        Raises TreeError if a node has no tokens.
        """
        tree = _Tree()
        index, depth = tree.index, tree.depth
        holder = []
        for request, length in zip(requests, seq_lens.tolist(), strict=True):
            row, owned = place_of(request)
            node = request.last_node
            # Without a tree, or after the host has released the request, nothing is shared.
            if node is None or row is None:
                holder.append(ROOT)
                continue
            held = index.get(node.id)
            if held is None:
                held = tree.add(node)
            shared = min(owned, length - 1)
            holder.append(held if depth[held] <= shared else tree.cut(held, shared))
        return forest_from_tree(tree.parent, depth, holder, seq_lens)


class _Tree:
    """The part of the host's tree that a batch holds; it visits each node once.

    - `index`: Host's node id → our node.
    - `parent`, `depth`: Parent and depth of each of our nodes; see
      :func:`~deft_backend.forest.forest_from_tree`.
    """

    __slots__ = ("_cuts", "depth", "index", "parent")

    def __init__(self) -> None:
        self.index: dict[int, int] = {}
        self.parent = [ROOT]
        self.depth = [0]
        self._cuts: dict[tuple[int, int], int] = {}

    def add(self, node: Any) -> int:
        """Add a node of the host, and those of its ancestors that are still missing."""
        index, parent, depth = self.index, self.parent, self.depth
        unknown = []
        above = None
        while above is None:
            upper = node.parent
            if upper is None:
                above = index[node.id] = ROOT
                break
            unknown.append(node)
            node = upper
            above = index.get(node.id)
        for node in reversed(unknown):
            tokens = len(node.key)
            if tokens <= 0:
                raise TreeError(f"node {node.id} of the radix tree holds {tokens} tokens")
            depth.append(depth[above] + tokens)
            parent.append(above)
            above = index[node.id] = len(parent) - 1
        return above

    def cut(self, held: int, shared: int) -> int:
        """The node at the end of the first `shared` tokens on the path to `held`."""
        if shared <= 0:
            return ROOT
        while self.depth[self.parent[held]] >= shared:
            held = self.parent[held]
        if self.depth[held] == shared:
            return held
        part = self._cuts.get((held, shared))
        if part is None:
            part = self._cuts[held, shared] = len(self.parent)
            self.parent.append(self.parent[held])
            self.depth.append(shared)
        return part


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
