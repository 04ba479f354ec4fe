"""PrefixForest from a host's radix tree: equal node on the path means equal prefix."""

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from deft_backend.forest.page_tables import ROOT, PrefixTree, order_of_tree
from deft_backend.forest.prefix_forest import ForestError, PrefixForest, build_forest, int32

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
    lens = int32(seq_lens, "seq_lens")
    children: dict[tuple[int, Hashable], int] = {}  # (node, identity of the child) -> child
    parent, depth, holder = [ROOT], [0], []
    for request, path in enumerate(paths):
        node = ROOT
        for identity, tokens in path:
            if tokens <= 0:
                raise ForestError(
                    f"request {request}: node {identity!r} holds {tokens} tokens; "
                    "expected 1 or more"
                )
            child = children.get((node, identity))
            if child is None:
                child = children[node, identity] = len(parent)
                parent.append(node)
                depth.append(depth[node] + tokens)
            node = child
        holder.append(node)
        if depth[node] > lens[request]:
            raise ForestError(
                f"request {request} holds {lens[request]} tokens but its path in the radix tree "
                f"holds {depth[node]}; expected a path no longer than the request"
            )
    order, shared = order_of_tree(PrefixTree(parent, depth, holder))
    return build_forest(order, shared, lens, page_size)
