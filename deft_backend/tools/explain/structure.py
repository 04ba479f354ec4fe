"""The nodes of a forest, and the groups and chunks of a grouping that read them."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from deft_backend.forest import VIRTUAL_ROOT, PrefixForest
from deft_backend.planner.encoding import DIRECT, ITEM_ORDER, OPEN_END
from deft_backend.planner.plan import Plan
from deft_backend.policies import Grouping
from deft_backend.shapes.kernel_limits import TILE_NAMES


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


class NodesOfRanges:
    """Finds the nodes of a forest that a KV range touches, from the leaf up."""

    def __init__(self, forest: PrefixForest) -> None:
        position = np.empty(forest.batch_size, dtype=np.int64)
        position[forest.order] = np.arange(forest.batch_size)
        self._leaf: list[int] = forest.leaf[position].tolist()
        self._parent = forest.parent.tolist()
        self._start, self._end = forest.start.tolist(), forest.end.tolist()

    def touched(self, request: int, first: int, stop: int, is_open: bool) -> Iterator[int]:
        """Nodes of `request` with a position from `first` to `stop`, and its leaf if still
        empty."""
        leaf = node = self._leaf[request]
        while node != VIRTUAL_ROOT and self._end[node] > first:
            if self._start[node] < stop:
                yield node
            node = self._parent[node]
        if is_open and self._start[leaf] == self._end[leaf]:  # an empty leaf will grow here
            yield leaf


def describe_nodes(forest: PrefixForest, grouping: Grouping) -> tuple[NodeFacts, ...]:
    """Every node, with the chunks that read it."""
    readers: list[list[int]] = [[] for _ in range(forest.num_nodes)]
    nodes = NodesOfRanges(forest)
    group_of = np.repeat(np.arange(grouping.num_groups), np.diff(grouping.segment_ptr)).tolist()
    segments = zip(
        group_of,
        grouping.request.tolist(),
        grouping.start.tolist(),
        grouping.end.tolist(),
        grouping.open.tolist(),
        strict=True,
    )
    for group, *ranged in segments:
        for node in nodes.touched(*ranged):
            readers[node].append(group)
    parent, start = forest.parent.tolist(), forest.start.tolist()
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


@dataclass(frozen=True)
class ItemFacts:
    """One work item."""

    tile: str  # the tile that computes it
    queries: tuple[int, ...]  # request indices
    tokens: int  # KV tokens that it loads
    nodes: tuple[int, ...]  # the nodes that it reads a part of
    # Whether it writes the outputs itself, so that no partial result waits for a merge.
    direct: bool


def describe_items(forest: PrefixForest, plan: Plan) -> tuple[ItemFacts, ...]:
    """Every work item of a plan, in the plan's order."""
    finder = NodesOfRanges(forest)
    is_open = plan.segment_end == OPEN_END
    end = np.where(is_open, forest.seq_lens[plan.segment_request], plan.segment_end)
    ranges = list(
        zip(plan.segment_request.tolist(), plan.segment_start.tolist(), end.tolist(),
            is_open.tolist(), strict=True)
    )  # fmt: skip
    queries, slots = plan.entry_query.tolist(), plan.entry_slot.tolist()
    segments, entries = plan.item_segment_ptr.tolist(), plan.item_query_ptr.tolist()
    items = []
    for at, shape in enumerate(ITEM_ORDER):
        for item in range(int(plan.tile_ptr[at]), int(plan.tile_ptr[at + 1])):
            read = ranges[segments[item] : segments[item + 1]]
            nodes = [node for ranged in read for node in finder.touched(*ranged)]
            own = slice(entries[item], entries[item + 1])
            items.append(
                ItemFacts(
                    tile=TILE_NAMES[shape],
                    queries=tuple(queries[own]),
                    tokens=sum(max(0, stop - start) for _, start, stop, _ in read),
                    nodes=tuple(dict.fromkeys(nodes)),
                    direct=all(slot <= DIRECT for slot in slots[own]),
                )
            )
    return tuple(items)
