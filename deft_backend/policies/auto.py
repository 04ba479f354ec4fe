"""`auto`: the grouping that the measured costs predict to be fastest for this forest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from deft_backend.forest import VIRTUAL_ROOT, PrefixForest
from deft_backend.policies.chunk_choice import shapes_of, tiles_of
from deft_backend.policies.edges import BoolArray
from deft_backend.policies.measured_chunks import exposed_share
from deft_backend.policies.policy import Rules, TwoRulePolicy
from deft_backend.policies.target import Target
from deft_backend.settings.policy_names import AUTO


@dataclass(frozen=True)
class Auto(TwoRulePolicy):
    """Edges by measured cost, then even chunks that fill the GPU.

    Q-guided grouping reads each query's whole context and merges nothing. One group for each node
    reads each token once and merges most. FastTree's edge assignment lies between these extremes:
    some nodes get their own groups, and the groups below the others read their tokens again.

    `auto` makes one pass over the forest, from the root down, and takes the cheaper way for each
    node by the cost table, for all of its children alike. It then chooses one chunk length for each
    tile shape (:mod:`~deft_backend.policies.chunk_choice`); FlashForge, section 5.1, chooses one
    for each task. If sharing saves less than the merges cost, each query reads its whole context
    alone, as with `flash-decoding`.
    """

    name: ClassVar[str] = AUTO
    chunks: str = "measured"
    """The rule of chunks: ``whole`` for kernels that split KV ranges themselves."""

    @property
    def rules(self) -> Rules:
        return Rules("measured", self.chunks)

    def cut_edges(self, forest: PrefixForest, target: Target) -> BoolArray:
        return measured_edges(forest, target)


def measured_edges(forest: PrefixForest, target: Target) -> BoolArray:
    """[N] whether the edge from each node's parent is cut, by measured costs.

    From the root down, either a node gets its own items, whose partial results must be merged, or
    every item below the node reads its tokens as part of a longer range. Either way, each child
    then takes its own cheaper way, as if no node further below got items. The cheaper way for the
    GPU wins.
    """
    tile_queries, costs = np.array(target.single_range_tiles), target.tile_costs().tolist()
    shapes = len(tile_queries)
    programs = target.programs_for(forest.batch_size)[:shapes]
    # A few requests do not fill the GPU, so each of their tokens costs the GPU more time.
    busy = [max(1, min(programs[0], forest.batch_size)), *programs[1:]]
    item_ns = [costs[t] / busy[t] for t in range(shapes)]
    item_ns[0] *= exposed_share(busy[0], programs[0])
    token_ns = [costs[shapes + t] / busy[t] for t in range(shapes)]
    partial = costs[2 * shapes]

    count = forest.num_queries.astype(np.int64)
    shape, tiles = shapes_of(count, tile_queries), tiles_of(count, tile_queries)
    queries, length = count.tolist(), forest.length.tolist()
    own = (tiles * np.array(token_ns)[shape]).tolist()  # time of one token, by the node's items
    items = (tiles * np.array(item_ns)[shape]).tolist()  # time of those items, besides tokens
    parent, end, is_leaf = forest.parent.tolist(), forest.end.tolist(), forest.is_leaf.tolist()
    below = [0.0] * len(parent)  # time of one token, if the items of the node's children read it
    for v in range(len(parent) - 1, -1, -1):
        if parent[v] != VIRTUAL_ROOT:
            below[parent[v]] += own[v]

    base = [0] * len(parent)  # first token of the ranges below each node
    merged = [False] * len(parent)  # whether queries have a partial result from above
    takes = [False] * len(parent)  # whether the node gets its own items
    for v, children in enumerate(forest.children):
        above = parent[v]
        if above != VIRTUAL_ROOT:
            base[v], merged[v] = base[above], merged[above]
        tokens = end[v] - base[v]
        if is_leaf[v] or tokens == 0:
            continue
        saved = 0.0
        for c in children:
            if is_leaf[c]:
                saved += tokens * own[c]
                continue
            its = items[c] + queries[c] * partial  # its items and one result of each query
            alone = min(length[c] * own[c] + its, length[c] * below[c])
            first = 0.0 if merged[v] else queries[c] * partial
            joined = tokens + length[c]
            saved += min(joined * own[c] + its + first, joined * below[c]) - alone
        results = queries[v] if merged[v] else 2 * queries[v]
        if tokens * own[v] + items[v] + results * partial < saved:
            base[v], merged[v], takes[v] = end[v], True, True
    return np.array([above != VIRTUAL_ROOT and takes[above] for above in parent], dtype=np.bool_)
