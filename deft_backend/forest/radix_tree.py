"""PrefixForest from a host's radix tree: equal node on the path means equal prefix."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from deft_backend.forest.prefix_forest import ForestError, PrefixForest, build_forest

Path = Sequence[tuple[Hashable, int]]
"""Nodes from the root downwards, as (identity, tokens held)."""


class _TrieNode:
    """A radix-tree node as far as this batch reaches into it."""

    __slots__ = ("children", "depth", "ending")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.children: dict[Hashable, _TrieNode] = {}
        self.ending: int | None = None


def forest_from_paths(
    paths: Sequence[Path],
    seq_lens: Sequence[int] | npt.NDArray[np.integer],
    page_size: int = 1,
) -> PrefixForest:
    """Group requests by the radix-tree nodes that they hold.

    Parameters
    ----------
    paths : [B] paths
        For each request, the tree nodes that hold the head of its context, root first. What a
        request holds beyond its path is private to it.
    seq_lens : [B] int
        Tokens of each request.
    page_size : int
        Tokens a page; a radix tree holds whole pages only.

    Returns
    -------
    PrefixForest
        The same arrays that :func:`~deft_backend.forest.page_tables.forest_from_page_tables`
        makes of the same batch: nodes that only one request of the batch holds are merged into
        its leaf, chains that the same requests hold are merged into one node, and subtrees are
        ordered by their first row.

    Raises
    ------
    ForestError
        If a node's length is not positive, or a path holds more tokens than its request.
    """
    lens = [int(n) for n in seq_lens]
    if len(paths) != len(lens):
        raise ForestError(
            f"{len(paths)} paths for {len(lens)} sequence lengths; expected as many of each"
        )
    root = _TrieNode(0)
    for request, path in enumerate(paths):
        node = root
        for identity, tokens in path:
            if tokens <= 0:
                raise ForestError(
                    f"request {request}: node {identity!r} holds {tokens} tokens; "
                    "expected 1 or more"
                )
            child = node.children.get(identity)
            if child is None:
                child = node.children[identity] = _TrieNode(node.depth + tokens)
            node = child
        if node.depth > lens[request]:
            raise ForestError(
                f"request {request} holds {lens[request]} tokens but its path in the radix tree "
                f"holds {node.depth}; expected a path no longer than the request"
            )
        # The private rest is a child of its own: no other request can name this key.
        rest = node.children[_Private(request)] = _TrieNode(node.depth)
        rest.ending = request

    order: list[int] = []
    shared: list[int] = []
    # `seam` is the depth of the deepest node that this subtree and what precedes it share.
    stack: list[tuple[_TrieNode, int]] = [(root, 0)]
    while stack:
        visited, seam = stack.pop()
        if visited.ending is not None:
            if order:
                shared.append(seam)
            order.append(visited.ending)
            continue
        below = list(visited.children.values())  # insertion order: by first row in the batch
        for later in reversed(below[1:]):
            stack.append((later, visited.depth))
        if below:
            stack.append((below[0], seam))
    return build_forest(order, shared, lens, page_size)


class _Private:
    """Key of what only one request holds."""

    __slots__ = ("request",)

    def __init__(self, request: int) -> None:
        self.request = request
