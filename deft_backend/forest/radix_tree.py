"""PrefixForest from a host's radix tree: equal node on the path means equal prefix."""

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from deft_backend.forest.page_tables import PrefixTree, order_of_tree
from deft_backend.forest.prefix_forest import (
    ForestError,
    Int32Array,
    PrefixForest,
    build_forest,
    int32,
)

Path = Sequence[tuple[Hashable, int]]  # nodes from the root downwards, as (identity, tokens held)


def forest_from_paths(
    paths: Sequence[Path], seq_lens: Sequence[int] | npt.NDArray[np.integer], page_size: int = 1
) -> PrefixForest:
    """Group requests by the radix-tree nodes that they hold.

    - `paths` [B]: for each request, the tree nodes that hold the head of its context, root first.
      What a request holds beyond its path is private to it.
    - `seq_lens` [B] int: tokens of each request.
    - `page_size`: tokens a page; a radix tree holds whole pages only.

    Returns the same arrays that :func:`~deft_backend.forest.page_tables.forest_from_page_tables`
    makes of the same batch. Nodes that only one request of the batch holds become part of its leaf.
    Chains of nodes that the same requests hold become one node. Subtrees are ordered by their first
    request.

    Raises ForestError if the numbers of paths and lengths differ, a node's length is not positive,
    or a path holds more tokens than its request.
    """
    if len(paths) != len(seq_lens):
        raise ForestError(
            f"{len(paths)} paths for {len(seq_lens)} sequence lengths; expected as many of each"
        )
    below: list[dict[Hashable, int] | None] = [None]  # children of each tree node
    parent, depth, holder = [0], [0], []
    for request, path in enumerate(paths):
        node = 0
        for identity, tokens in path:
            if tokens <= 0:
                raise ForestError(
                    f"request {request}: node {identity!r} holds {tokens} tokens; "
                    "expected 1 or more"
                )
            siblings = below[node]
            if siblings is None:
                siblings = below[node] = {}
            child = siblings.get(identity)
            if child is None:
                child = siblings[identity] = len(below)
                below.append(None)
                parent.append(node)
                depth.append(depth[node] + tokens)
            node = child
        holder.append(node)
    return forest_from_tree(parent, depth, holder, seq_lens, page_size)


def forest_from_tree(
    parent: Sequence[int] | Int32Array,
    depth: Sequence[int] | Int32Array,
    holder: Sequence[int] | Int32Array,
    seq_lens: Sequence[int] | npt.NDArray[np.integer],
    page_size: int = 1,
) -> PrefixForest:
    """Group requests by the nodes of one tree; :func:`forest_from_paths` without the paths.

    - `parent` [T] int: of each tree node, which it precedes. Node 0 is the root and its own parent.
    - `depth` [T] int: tokens from the root to the end of each node; the root's is 0.
    - `holder` [B] int: tree node at the end of what each request holds of the tree.

    Raises ForestError if lengths do not match, a node does not come after its parent or is not
    deeper, or a request holds no node of the tree, or a node deeper than the request is long.
    """
    parent_, depth_ = int32(parent, "parent"), int32(depth, "depth")
    holder_, lens = int32(holder, "holder"), int32(seq_lens, "seq_lens")
    if len(parent_) != len(depth_) or len(holder_) != len(lens) or not len(parent_):
        raise ForestError(
            f"{len(parent_)} parents, {len(depth_)} depths, {len(holder_)} holders and {len(lens)} "
            "sequence lengths; expected a parent and a depth a node, and a holder and a length a "
            "request"
        )
    _check_tree(parent_, depth_, holder_, lens)
    tree = PrefixTree(parent_.tolist(), depth_.tolist(), holder_.tolist())
    order, shared = order_of_tree(tree)
    return build_forest(order, shared, lens, page_size)


def _check_tree(
    parent: Int32Array, depth: Int32Array, holder: Int32Array, lens: Int32Array
) -> None:
    nodes = np.arange(len(parent))
    above = np.clip(parent, 0, len(parent) - 1)
    misplaced = (parent < 0) | (parent >= nodes) | (depth <= depth[above])
    misplaced[0] = parent[0] != 0 or depth[0] != 0
    if misplaced.any():
        node = int(misplaced.argmax())
        raise ForestError(
            f"tree node {node} has parent {parent[node]} and ends at token {depth[node]}; "
            "expected a parent before it that ends before it (the root: node 0 at token 0)"
        )
    unknown = (holder < 0) | (holder >= len(parent))
    held = depth[np.where(unknown, 0, holder)]
    if (wrong := unknown | (held > lens)).any():
        request = int(wrong.argmax())
        if unknown[request]:
            raise ForestError(
                f"request {request} ends at tree node {holder[request]}; expected one of 0 to "
                f"{len(parent) - 1}"
            )
        raise ForestError(
            f"request {request} holds {lens[request]} tokens but its path in the radix tree "
            f"holds {held[request]}; expected a path no longer than the request"
        )
