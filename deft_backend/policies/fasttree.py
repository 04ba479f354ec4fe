"""`fasttree`: binary edge assignment by a greedy search over padding and reduction costs."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from deft_backend.costs.cost_model import FastTreeCoefficients
from deft_backend.costs.fasttree_costs import FastTreeCosts
from deft_backend.forest import VIRTUAL_ROOT, PrefixForest
from deft_backend.policies.grouping import Grouping
from deft_backend.policies.splitting import (
    KVRanges,
    chunks_by,
    concatenated_ranges,
    cut_evenly,
    fit_chunk_tokens,
    offsets,
)
from deft_backend.policies.target import Target
from deft_backend.settings.policy_names import FASTTREE


@dataclass(frozen=True)
class FastTree:
    """FastTree's context-query grouping as a binary edge assignment.

    Every edge ``v -> l`` gets 0 or 1. With 0 (*split KV*), parent and child are two groups, and the
    child's queries have one more partial result. With 1 (*split Q*), the child's queries leave the
    parent's group. They attend to the parent's context concatenated with the child's. A
    breadth-first search takes the cheaper choice for each edge; see :class:`FastTreeCosts` for the
    equations. The parent's context grows by concatenation on the way down. The nodes of a path
    follow one another in the page-table rows of its queries, so a concatenated context is one KV
    range.

    *Long-context splitting*: the policy then cuts contexts until no thread block is idle and no
    context outlasts the others. *Multi-phase tiling*: a group's phase is the smallest query tile
    that holds it.

    Attributes
    ----------
    coefficients : FastTreeCoefficients, optional
        alpha, beta and gamma; default those of the target's cost model.
    """

    name: ClassVar[str] = FASTTREE
    several_segments: ClassVar[bool] = False
    on_device: ClassVar[bool] = False

    coefficients: FastTreeCoefficients | None = None

    def group(self, forest: PrefixForest, target: Target) -> Grouping:
        ranges = assigned_ranges(forest, self.assign_edges(forest, target))
        chunk = fit_chunk_tokens(self.name, ranges, target, fill_programs=True)
        return cut_evenly(ranges, chunks_by(ranges.tokens, chunk), target.block_tokens)

    def assign_edges(self, forest: PrefixForest, target: Target) -> npt.NDArray[np.bool_]:
        """The greedy search (FastTree, cost-based greedy heuristic).

        Returns
        -------
        [N] bool
            For each node the value of the edge from its parent; False for roots.
        """
        coefficients = self.coefficients or target.costs.fasttree
        costs = edge_costs(coefficients, target)
        children = forest.children
        queries = forest.num_queries.tolist()
        context = forest.length.tolist()  # grows by concatenation
        assigned = np.zeros(forest.num_nodes, dtype=bool)
        frontier = deque(np.flatnonzero(forest.parent == VIRTUAL_ROOT).tolist())
        while frontier:
            node = frontier.popleft()
            remaining, length = queries[node], context[node]
            for child in children[node]:
                edge = (remaining, queries[child], length, context[child])
                if costs.split_kv(*edge) > costs.split_q(*edge):
                    assigned[child] = True
                    remaining -= queries[child]
                    context[child] += length
                frontier.append(child)
        return assigned


def edge_costs(coefficients: FastTreeCoefficients, target: Target) -> FastTreeCosts:
    """FastTree's cost equations on the tiles that the target's kernels offer."""
    phases = tuple((rows, target.block_tokens) for rows in sorted(set(target.tile_heights)))
    return FastTreeCosts(coefficients, phases, target.head_dim, target.query_vectors)


def assigned_ranges(forest: PrefixForest, assigned: npt.NDArray[np.bool_]) -> KVRanges:
    """Context-query groups of an edge assignment.

    Parameters
    ----------
    forest : PrefixForest
    assigned : [N] bool
        Value of the edge from each node's parent; True concatenates.

    Returns
    -------
    KVRanges
        One range for each node that any query still attends to as its own group.
    """
    batch, nodes = forest.batch_size, forest.num_nodes
    start = forest.start.copy()
    for node in np.flatnonzero(assigned).tolist():  # depth-first order: parents come first
        start[node] = start[forest.parent[node]]

    # Mark the queries that each node's group keeps: the node's, without those of concatenated
    # children. The marks are flat over (node, query) pairs: a node's queries are a range of the
    # forest order.
    count = forest.num_queries.astype(np.int64)
    pair_of = np.cumsum(count) - count
    position = concatenated_ranges(forest.query_begin, count)
    keeps = np.ones(len(position), dtype=bool)
    child = np.flatnonzero(assigned)
    parent = forest.parent[child]
    first = pair_of[parent] + forest.query_begin[child] - forest.query_begin[parent]
    keeps[concatenated_ranges(first, count[child])] = False

    owner = np.repeat(np.arange(nodes), count)[keeps]
    queries = forest.order[position[keeps]]
    kept = np.bincount(owner, minlength=nodes)
    of_request = forest.request.copy()
    is_open = forest.is_leaf.copy()

    # An empty leaf behind a group of the same single query needs no group of its own. That group
    # ends where the query's context ends, and grows with it.
    first_kept = np.cumsum(kept) - kept
    for leaf in np.flatnonzero(forest.is_leaf & (forest.length == 0) & ~assigned).tolist():
        parent_ = int(forest.parent[leaf])
        if parent_ != VIRTUAL_ROOT and kept[parent_] == 1:
            of_request[parent_] = queries[first_kept[parent_]]
            is_open[parent_] = True
            kept[leaf] = 0
    alive = kept > 0
    queries = queries[alive[owner]]
    assert batch == 0 or alive.any()
    return KVRanges(
        request=of_request[alive],
        start=start[alive],
        end=forest.end[alive],
        open=is_open[alive],
        query_ptr=offsets(kept[alive]),
        queries=queries,
    )
