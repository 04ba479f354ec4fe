"""The nodes of a forest, and the groups and chunks of a grouping that read them."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

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
    ranges: dict[tuple[int, bytes], list[tuple[int, int, int]]] = {}
    for g in np.flatnonzero(np.diff(grouping.segment_ptr) == 1).tolist():
        at = grouping.segment_ptr[g]
        start, end = int(grouping.start[at]), int(grouping.end[at])
        if end > start:  # an empty range continues nothing
            key = int(grouping.request[at]), grouping.group_queries(g).tobytes()
            ranges.setdefault(key, []).append((start, end, g))
    first = list(range(grouping.num_groups))
    for chunks in ranges.values():
        for (_, end, before), (start, _, g) in pairwise(sorted(chunks)):
            if start == end:
                first[g] = first[before]
    numbers = {g: number for number, g in enumerate(sorted(set(first)))}
    return [numbers[g] for g in first]


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
    columns = (
        forest.parent, forest.request, forest.start, forest.length, forest.num_queries,
        forest.is_leaf,
    )  # fmt: skip
    chunks = [tuple(dict.fromkeys(groups)) for groups in readers]
    rows = zip(*(column.tolist() for column in columns), chunks, strict=True)
    return tuple(NodeFacts(*row) for row in rows)


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
