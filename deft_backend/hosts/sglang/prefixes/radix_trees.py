"""The forest of a decode batch, read from the nodes of SGLang's radix trees.

A request's path through the tree is cut to what the tree owns of the request, and to
``seq_len - 1`` tokens. A cut node differs from the whole node.
"""

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
        """Forest of a decode batch. Raises TreeError if a node has no tokens."""
        tree = _Tree()
        holder = []
        for request, length in zip(requests, seq_lens.tolist(), strict=True):
            node, shared = _held(request, length)
            if shared <= 0:
                holder.append(ROOT)
                continue
            end = tree.index.get(node.id)
            if end is None:
                end = tree.add(node)
            holder.append(end if tree.depth[end] <= shared else tree.cut(end, shared))
        return forest_from_tree(tree.parent, tree.depth, holder, seq_lens)


class _Tree:
    """The part of the host's tree that a batch holds. Requests' paths meet, so each node is visited
    once.

    - `index`: the host's node id → our node.
    - `parent`, `depth`: of our nodes; see :func:`~deft_backend.forest.forest_from_tree`.
    """

    def __init__(self) -> None:
        self.index: dict[int, int] = {}
        self.parent = [ROOT]
        self.depth = [0]
        self._cuts: dict[tuple[int, int], int] = {}

    def add(self, node: Any) -> int:
        """Add a node of the host, and those of its ancestors that are still missing."""
        unknown = []
        while node.parent is not None and node.id not in self.index:
            unknown.append(node)
            node = node.parent
        above = self.index.setdefault(node.id, ROOT)
        for node in reversed(unknown):
            tokens = len(node.key)
            if tokens <= 0:
                raise TreeError(f"node {node.id} of the radix tree holds {tokens} tokens")
            above = self.index[node.id] = self._append(above, self.depth[above] + tokens)
        return above

    def cut(self, end: int, shared: int) -> int:
        """The node at the end of the first `shared` tokens on the path to `end`."""
        while self.depth[self.parent[end]] >= shared:
            end = self.parent[end]
        if self.depth[end] == shared:
            return end
        part = self._cuts.get((end, shared))
        if part is None:
            part = self._cuts[end, shared] = self._append(self.parent[end], shared)
        return part

    def _append(self, parent: int, depth: int) -> int:
        self.parent.append(parent)
        self.depth.append(depth)
        return len(self.parent) - 1


class UnifiedTreeSource:
    """Reads paths of the tree; its core is in Rust or in Python.

    - `paths`: Lists the nodes on the path from the root to each given node.
    """

    def __init__(self, paths: TreePaths) -> None:
        self._paths = paths

    def forest(self, requests: Sequence[Any], seq_lens: npt.NDArray[np.integer]) -> PrefixForest:
        """Forest of a decode batch.

        Raises TreeError if tokens on a path are not on the device, or a node does not start where
        its parent ends.
        """
        held = [_held(*pair) for pair in zip(requests, seq_lens.tolist(), strict=True)]
        ends = list({node: None for node, _ in held if node is not None})
        paths = dict(zip(ends, self._paths(ends) if ends else (), strict=True))
        parent, depth = [ROOT], [0]
        index: dict[tuple[int, int], int] = {}
        holder = []
        for end, shared in held:
            node = ROOT
            for part in paths[end] if shared > 0 else ():
                if part.path_start >= shared:
                    break
                _check(part, depth[node])
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


def _held(request: Any, length: int) -> tuple[Any, int]:
    """The node at the end of a request's path, and the tokens of the path that it may share.

    Without a tree, or after the host has released the request, there are none.
    """
    row, owned = place_of(request)
    if request.last_node is None or row is None:
        return None, 0
    return request.last_node, min(owned, length - 1)


def _check(part: Any, start: int) -> None:
    if part.path_start != start:
        raise TreeError(
            f"node {part.node_id} of the radix tree starts at token {part.path_start}, its parent "
            f"ends at {start}"
        )
    tokens = part.path_end - start
    if part.full_value_len != tokens:
        raise TreeError(
            f"node {part.node_id} of the radix tree has {part.full_value_len} of its {tokens} "
            "tokens on the device"
        )
