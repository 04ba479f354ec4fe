"""The nodes of a forest, and the groups and chunks of a grouping that read them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deft_backend.forest import VIRTUAL_ROOT, PrefixForest
from deft_backend.policies import Grouping


@dataclass(frozen=True)
class ChunkFacts:
    """One group of the plan.

    `group` numbers the range that the chunk was cut from, `tiles` its query tiles.
    """

    group: int
    tokens: int
    queries: int
    kv_bytes: int
    tiles: int


@dataclass(frozen=True)
class NodeFacts:
    """One node of the forest, and the chunks that read any part of it, in the grouping's order."""

    parent: int
    request: int
    start: int
    tokens: int
    queries: int
    leaf: bool
    chunks: tuple[int, ...]


def rejoin_chunks(grouping: Grouping) -> list[int]:
    """Number of the range that each group was cut from.

    A group continues another group if it has the same queries and request, and starts where the
    other ends.
    """
    begins: dict[tuple[int, int, bytes], int] = {}
    single = np.diff(grouping.segment_ptr) == 1
    keys: list[tuple[int, int, bytes] | None] = []
    for g in range(grouping.num_groups):
        key = None
        if single[g]:
            s = int(grouping.segment_ptr[g])
            key = (
                int(grouping.request[s]),
                int(grouping.start[s]),
                grouping.group_queries(g).tobytes(),
            )
            if grouping.end[s] > grouping.start[s]:  # an empty range continues nothing
                begins[key] = g
        keys.append(key)

    number = [-1] * grouping.num_groups
    follows: dict[int, int] = {}
    for g, key in enumerate(keys):
        if key is not None:
            end = int(grouping.end[grouping.segment_ptr[g]])
            after = begins.get((key[0], end, key[2]))
            if after is not None and after != g:
                follows[g] = after
    heads = set(range(grouping.num_groups)) - set(follows.values())
    for count, head in enumerate(sorted(heads)):
        at: int | None = head
        while at is not None:
            number[at] = count
            at = follows.get(at)
    return number


def describe_nodes(forest: PrefixForest, grouping: Grouping) -> tuple[NodeFacts, ...]:
    """Every node, with the chunks that read it."""
    readers: list[list[int]] = [[] for _ in range(forest.num_nodes)]
    position = np.empty(forest.batch_size, dtype=np.int64)
    position[forest.order] = np.arange(forest.batch_size)
    parent, start, end = forest.parent.tolist(), forest.start.tolist(), forest.end.tolist()
    group_of = np.repeat(np.arange(grouping.num_groups), np.diff(grouping.segment_ptr)).tolist()
    leaf_of = forest.leaf[position[grouping.request]].tolist()
    segments = zip(
        group_of,
        leaf_of,
        grouping.start.tolist(),
        grouping.end.tolist(),
        grouping.open.tolist(),
        strict=True,
    )
    for group, leaf, first, stop, is_open in segments:
        node = leaf
        while node != VIRTUAL_ROOT and end[node] > first:
            if start[node] < stop:
                readers[node].append(group)
            node = parent[node]
        if is_open and start[leaf] == end[leaf]:  # an empty leaf will grow here
            readers[leaf].append(group)
    queries, leaves = forest.num_queries.tolist(), forest.is_leaf.tolist()
    requests, lengths = forest.request.tolist(), forest.length.tolist()
    return tuple(
        NodeFacts(
            parent=parent[node],
            request=requests[node],
            start=start[node],
            tokens=lengths[node],
            queries=queries[node],
            leaf=leaves[node],
            chunks=tuple(dict.fromkeys(readers[node])),
        )
        for node in range(forest.num_nodes)
    )
