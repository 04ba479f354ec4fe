"""`auto`: the grouping that the measured costs predict to be fastest for this forest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from deft_backend.compile.host_jit import host_jit
from deft_backend.costs.cost_model import FloatArray
from deft_backend.forest import PrefixForest
from deft_backend.policies.chunk_choice import shape_of
from deft_backend.policies.edges import ROOT, BoolArray, Int32Array, Int64Array
from deft_backend.policies.errors import PolicyError
from deft_backend.policies.measured_chunks import exposed_share
from deft_backend.policies.policy import Rules, TwoRulePolicy
from deft_backend.policies.target import Target
from deft_backend.settings.policy_names import AUTO


@dataclass(frozen=True)
class Auto(TwoRulePolicy):
    """Edges by measured cost, then even chunks that fill the GPU.

    Two groupings are the extremes. Q-guided grouping reads each query's whole context and merges
    nothing. One group for each node reads each token once and merges most. FastTree's edge
    assignment lies between them. Some nodes get their own groups. The groups below the other nodes
    read those nodes' tokens again.

    `auto` makes one pass over the forest, from the root down. For each node it takes the cheaper
    way by the cost table (:class:`~deft_backend.costs.tile_costs.TileCosts`), for all of the node's
    children alike. It then chooses one chunk length for each tile shape
    (:mod:`~deft_backend.policies.chunk_choice`); FlashForge, section 5.1, chooses one for each
    task. In a batch that shares nothing, each query reads its whole context alone, as with
    `flash-decoding`. So it does in a tree whose sharing saves less than the merges cost.
    """

    name: ClassVar[str] = AUTO
    chunks: str = "measured"
    """The rule of chunks: ``whole`` for kernels that split KV ranges themselves."""

    @property
    def rules(self) -> Rules:
        return Rules("measured", self.chunks)

    def cut_edges(self, forest: PrefixForest, target: Target) -> BoolArray:
        tile_queries = np.array(target.single_range_tiles, dtype=np.int64)
        held = len(target.costs.tiles.item_ns)
        if held != len(tile_queries):
            raise PolicyError(
                f"the cost table holds {held} tile shapes; expected {len(tile_queries)}: measure "
                "this version's kernels with `deft tune`"
            )
        programs = target.programs_for(forest.batch_size)[: len(tile_queries)]
        return measured_edges(
            forest.parent, forest.start, forest.length,
            (forest.query_end - forest.query_begin).astype(np.int64), forest.is_leaf, tile_queries,
            np.array(programs, dtype=np.int64), target.tile_costs(),
        )  # fmt: skip


@host_jit
def measured_edges(
    parent: Int32Array, start: Int32Array, length: Int32Array, queries: Int64Array,
    is_leaf: BoolArray, tile_queries: Int64Array, programs: Int64Array, costs: FloatArray,
) -> BoolArray:  # fmt: skip
    """[N] whether the edge from each node's parent is cut, by measured costs.

    The function goes from the root down and compares two ways to read a node's tokens. Either they
    get their own items, whose partial results must be merged. Or every item below the node reads
    them as part of a longer range. Either way, each child then takes its own cheaper way, as if no
    node further below got items. The cheaper way for the GPU wins.

    Items of the small tile hide most of each other's own time
    (:func:`~deft_backend.policies.measured_chunks.exposed_share`).

    - `parent`, `start`, `length`, `queries`, `is_leaf` [N]: as in
      :class:`~deft_backend.forest.PrefixForest`.
    - `tile_queries`, `programs` [T] int64: queries that each tile shape holds, ascending, and
      programs of each that run at once.
    - `costs` [2 T + 2] float64: of :meth:`~deft_backend.costs.TileCosts.as_array`.
    """
    shapes = len(tile_queries)
    nodes = len(parent)
    token = np.empty(shapes)
    item = np.empty(shapes)
    leaves = np.int64(0)
    for v in range(nodes):
        leaves += is_leaf[v]
    for t in range(shapes):
        # A few requests do not fill the GPU, so each of their tokens costs the GPU more time.
        busy = max(1, min(programs[t], leaves)) if t == 0 else programs[t]
        item[t] = costs[t] / busy
        if t == 0:
            item[t] *= exposed_share(busy, programs[t])
        token[t] = costs[shapes + t] / busy
    partial = costs[2 * shapes]

    own = np.empty(nodes)  # time of one token, if the node's items read it
    items = np.empty(nodes)  # time of the node's items, besides their tokens
    below = np.zeros(nodes)  # time of one token, if the items of the node's children read it
    child = np.full(nodes, ROOT)  # the node's first child
    sibling = np.full(nodes, ROOT)  # the next child of the node's parent
    for v in range(nodes - 1, -1, -1):
        shape = shape_of(queries[v], tile_queries)
        tiles = (queries[v] + tile_queries[shape] - 1) // tile_queries[shape]
        own[v] = tiles * token[shape]
        items[v] = tiles * item[shape]
        if parent[v] != ROOT:
            below[parent[v]] += own[v]
            sibling[v] = child[parent[v]]
            child[parent[v]] = v

    is_cut = np.zeros(nodes, dtype=np.bool_)
    base = np.zeros(nodes, dtype=np.int64)  # first token of the ranges below each node
    merged = np.zeros(nodes, dtype=np.bool_)  # whether queries have a partial result from above
    takes = np.zeros(nodes, dtype=np.bool_)
    for v in range(nodes):
        if parent[v] != ROOT:
            base[v] = base[parent[v]]
            merged[v] = merged[parent[v]]
            is_cut[v] = takes[parent[v]]
        tokens = np.int64(start[v]) + length[v] - base[v]
        if is_leaf[v] or tokens == 0:
            continue
        saved = 0.0
        c = child[v]
        while c != ROOT:
            if is_leaf[c]:
                saved += tokens * own[c]
            else:
                its = items[c] + queries[c] * partial  # its items and one result of each query
                alone = min(length[c] * own[c] + its, length[c] * below[c])
                first = 0.0 if merged[v] else queries[c] * partial
                joined = tokens + length[c]
                saved += min(joined * own[c] + its + first, joined * below[c]) - alone
            c = sibling[c]
        results = queries[v] if merged[v] else 2 * queries[v]
        if tokens * own[v] + items[v] + results * partial < saved:
            base[v] += tokens
            merged[v] = True
            takes[v] = True
    return is_cut
