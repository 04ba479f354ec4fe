"""Nodes of a forest, from a batch order and the tokens that neighbours share."""

import numpy as np
import numpy.typing as npt

from deft_backend.compile.host_jit import host_jit

Int32Array = npt.NDArray[np.int32]

VIRTUAL_ROOT = -1
"""Parent of every tree's root: it joins unrelated trees into one (FlashForge, section 4.1)."""


@host_jit
def nodes_of(
    order: Int32Array, shared: Int32Array, seq_lens: Int32Array
) -> tuple[Int32Array, Int32Array, Int32Array, Int32Array, Int32Array, Int32Array, Int32Array]:
    """Parent, request, start, length, query begin, query end [N] and leaf [B] of a forest.

    A node boundary lies where the longest common prefix of neighbours changes. One stack finds all
    boundaries (nearest smaller values). The caller checks the arguments.
    """
    batch = len(order)
    # Shared nodes in the order in which they close: an inner one before those around it.
    begin = np.empty(batch, dtype=np.int32)
    stop = np.empty(batch, dtype=np.int32)
    end = np.empty(batch, dtype=np.int32)
    opening = np.zeros(batch + 1, dtype=np.int32)  # [p]: nodes that begin at place p - 1
    open_begin = np.empty(batch, dtype=np.int32)
    open_end = np.empty(batch, dtype=np.int32)
    num_open = 0
    num_shared = 0
    for place in range(1, batch + 1):
        common = shared[place - 1] if place < batch else 0
        first = place - 1
        while num_open > 0 and open_end[num_open - 1] > common:
            num_open -= 1
            first = open_begin[num_open]
            begin[num_shared] = first
            stop[num_shared] = place
            end[num_shared] = open_end[num_open]
            num_shared += 1
            opening[first + 1] += 1
        if common > 0 and (num_open == 0 or open_end[num_open - 1] < common):
            open_begin[num_open] = first
            open_end[num_open] = common
            num_open += 1

    # Depth-first order: by first place, outer before inner, and a place's leaf last.
    for place in range(batch):
        opening[place + 1] += opening[place]
    by_begin = np.empty(num_shared, dtype=np.int32)
    filled = opening.copy()
    for closed in range(num_shared - 1, -1, -1):  # backwards: outer before inner
        first = begin[closed]
        by_begin[filled[first]] = closed
        filled[first] += 1

    nodes = num_shared + batch
    parent = np.empty(nodes, dtype=np.int32)
    of_request = np.empty(nodes, dtype=np.int32)
    start = np.empty(nodes, dtype=np.int32)
    length = np.empty(nodes, dtype=np.int32)
    query_begin = np.empty(nodes, dtype=np.int32)
    query_end = np.empty(nodes, dtype=np.int32)
    leaf = np.empty(batch, dtype=np.int32)
    node = 0
    above = VIRTUAL_ROOT
    reached = 0  # first token after the node above
    for place in range(batch):
        while above != VIRTUAL_ROOT and query_end[above] <= place:
            reached = start[above]
            above = parent[above]
        request = order[place]
        for index in range(opening[place], opening[place + 1]):
            closed = by_begin[index]
            parent[node] = above
            of_request[node] = request
            start[node] = reached
            length[node] = end[closed] - reached
            query_begin[node] = place
            query_end[node] = stop[closed]
            reached = end[closed]
            above = node
            node += 1
        leaf[place] = node
        parent[node] = above
        of_request[node] = request
        start[node] = reached
        length[node] = seq_lens[request] - reached
        query_begin[node] = place
        query_end[node] = place + 1
        node += 1
    return parent, of_request, start, length, query_begin, query_end, leaf


NO_MISTAKE, BAD_LENGTH, BAD_ORDER, BAD_SHARED_COUNT, BAD_SHARED = range(5)


@host_jit
def first_mistake(
    order: Int32Array, shared: Int32Array, seq_lens: Int32Array, page_size: int
) -> tuple[int, int]:
    """The first mistake in the arguments of :func:`nodes_of`, and its index; 0 and 0 if none."""
    batch = len(seq_lens)
    for request in range(batch):
        if seq_lens[request] < 0:
            return BAD_LENGTH, request
    if len(order) != batch:
        return BAD_ORDER, 0
    seen = np.zeros(batch, dtype=np.bool_)
    for request in order:
        if request < 0 or request >= batch or seen[request]:
            return BAD_ORDER, 0
        seen[request] = True
    if len(shared) != max(0, batch - 1):
        return BAD_SHARED_COUNT, 0
    for place in range(batch - 1):
        common = shared[place]
        limit = min(seq_lens[order[place]], seq_lens[order[place + 1]])
        if common < 0 or common > limit or common % page_size != 0:
            return BAD_SHARED, place
    return NO_MISTAKE, 0


@host_jit
def depth_of(parent: Int32Array) -> Int32Array:
    """[N] ancestors of each node; parents precede their children."""
    depth = np.zeros(len(parent), dtype=np.int32)
    for node in range(len(parent)):
        if parent[node] != VIRTUAL_ROOT:
            depth[node] = depth[parent[node]] + 1
    return depth
