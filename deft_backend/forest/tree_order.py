"""Batch order of a prefix tree: depth first, subtrees by their first request."""

import numpy as np

from deft_backend.compile.host_jit import host_jit
from deft_backend.forest.nodes import Int32Array

NONE = -1


@host_jit
def order_of_tree(
    parent: Int32Array, depth: Int32Array, holder: Int32Array, nodes: int
) -> tuple[Int32Array, Int32Array]:
    """Order the batch so that requests that share are neighbours.

    - `parent`, `depth` [>= nodes] int32: parent of each tree node and its depth, in any unit. Node
      0 is the root.
    - `holder` [B] int32: tree node that holds the end of what each request shares.
    - `nodes`: tree nodes; the order ignores nodes that no request holds.

    Returns the requests in depth-first order [B]. Also, for neighbours in this order, the depth of
    the deepest node that they have in common [max(0, B - 1)]. The children of a node and the
    requests that end there are ordered by their first request.
    """
    batch = len(holder)
    order = np.empty(batch, dtype=np.int32)
    shared = np.empty(max(0, batch - 1), dtype=np.int32)
    if batch == 0:
        return order, shared

    # Children are tree nodes and, from `nodes` on, requests. Walk up from each request in batch
    # order, so that each node is linked at its first request.
    first_child = np.full(nodes, NONE, dtype=np.int32)
    last_child = np.empty(nodes, dtype=np.int32)
    sibling = np.full(nodes + batch, NONE, dtype=np.int32)
    for request in range(batch):
        child = nodes + request
        above = holder[request]
        while True:
            linked = first_child[above] != NONE
            if linked:
                sibling[last_child[above]] = child
            else:
                first_child[above] = child
            last_child[above] = child
            if linked or above == 0:
                break
            child = above
            above = parent[above]

    place = 0
    seam = 0
    item = 0
    while True:
        while item < nodes:
            item = first_child[item]
        request = item - nodes
        order[place] = request
        if place > 0:
            shared[place - 1] = seam
        place += 1
        if place == batch:
            return order, shared
        above = holder[request]
        while sibling[item] == NONE:
            item = above
            above = parent[above]
        seam = depth[above]
        item = sibling[item]


@host_jit
def misplaced(
    parent: Int32Array, depth: Int32Array, holder: Int32Array, seq_lens: Int32Array
) -> tuple[int, int]:
    """First misplaced tree node and first request with a wrong holder; -1 if there is none.

    A node must come after its parent and be deeper. A request's holder must exist and must not be
    deeper than the request is long. Node 0 is the root, of depth 0; ``holder`` and ``seq_lens``
    have equal lengths.
    """
    nodes = len(parent)
    for node in range(nodes):
        above = parent[node]
        if node == 0:
            if above != 0 or depth[node] != 0:
                return node, -1
        elif above < 0 or above >= node or depth[node] <= depth[above]:
            return node, -1
    for request in range(len(holder)):
        held = holder[request]
        if held < 0 or held >= nodes or depth[held] > seq_lens[request]:
            return -1, request
    return -1, -1
