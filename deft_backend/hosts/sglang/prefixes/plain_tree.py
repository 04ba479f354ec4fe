"""The forest of a decode batch, read from the nodes of SGLang's plain radix tree."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deft_backend.forest import PrefixForest, forest_from_tree
from deft_backend.hosts.sglang.versions import place_of

ROOT = 0  # the root among the nodes of a :class:`_Tree`


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
