"""The forest of a decode batch, read from the requests' nodes in SGLang's radix tree.

What may be trusted, and why it stays true while a plan is in use, is argued in
``docs/hosts-sglang.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from deft_backend.forest import PrefixForest, forest_from_tree

Key = tuple[int, int]
"""(id of the last node, tokens the tree owns): with the same key a row keeps the same prefix."""

PRIVATE: Key = (-1, 0)
"""Key of a request that holds nothing of the tree."""


ROOT = 0
"""The root among the nodes of a :class:`_Tree`."""


class TreeError(ValueError):
    """A radix tree that does not look as expected."""


def known_tree(tree_cache: Any) -> str | None:
    """Why the prefixes of requests under this cache cannot be read, or None.

    Only two classes are known: the plain radix tree, and the cache of servers without one. Others
    (hierarchical, sliding window, Mamba, sessions) keep nodes whose tokens are not all on the
    device, or not all valid.
    """
    kind = type(tree_cache)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name == "sglang.srt.mem_cache.chunk_cache.ChunkCache":
        return None
    if name != "sglang.srt.mem_cache.radix_cache.RadixCache":
        return f"prefixes under a {kind.__qualname__} cannot be read"
    if getattr(tree_cache, "is_eagle", False):
        return "prefixes under a radix tree of bigrams cannot be read"
    return None


def key_of(request: Any) -> Key:
    """What decides which prefix of the request others may share; see :data:`Key`."""
    node = request.last_node
    if node is None or request.req_pool_idx is None:  # no tree, or its KV was given back already
        return PRIVATE
    return (node.id, request.cache_protected_len)


def forest_of(requests: Sequence[Any], seq_lens: npt.NDArray[np.integer]) -> PrefixForest:
    """Forest of a decode batch.

    A request's path through the tree is cut to what the tree owns of the request, and to
    ``seq_len - 1`` tokens, so that the token being decoded is always private. A node that is cut
    is another node than the whole.

    Parameters
    ----------
    requests : [B] of the host's requests
        In batch order.
    seq_lens : [B] int, on the host
        Tokens of each request, the one being decoded included.

    Raises
    ------
    TreeError
        If a node has no tokens.
    """
    tree = _Tree()
    index, depth = tree.index, tree.depth
    holder = []
    for request, length in zip(requests, seq_lens.tolist(), strict=True):
        node = request.last_node
        if node is None or request.req_pool_idx is None:  # as in `key_of`
            holder.append(ROOT)
            continue
        held = index.get(node.id)
        if held is None:
            held = tree.add(node)
        shared = request.cache_protected_len
        if shared >= length:
            shared = length - 1
        holder.append(held if depth[held] <= shared else tree.cut(held, shared))
    return forest_from_tree(tree.parent, depth, holder, seq_lens)


class _Tree:
    """The part of the host's tree that a batch holds; each of its nodes is visited once.

    Attributes
    ----------
    index : dict
        Host's node id → our node.
    parent, depth : list
        Of each node of ours; see :func:`~deft_backend.forest.forest_from_tree`.
    """

    __slots__ = ("_cuts", "depth", "index", "parent")

    def __init__(self) -> None:
        self.index: dict[int, int] = {}
        self.parent = [ROOT]
        self.depth = [0]
        self._cuts: dict[tuple[int, int], int] = {}

    def add(self, node: Any) -> int:
        """Add a node of the host, and those above it that are not known yet."""
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
        """The node at the end of the first `shared` tokens on the way to `held`."""
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
