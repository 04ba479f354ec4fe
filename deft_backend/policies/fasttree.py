"""`fasttree`: binary edge assignment by a greedy search over padding and reduction costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from deft_backend.costs.cost_model import FastTreeCoefficients
from deft_backend.forest import VIRTUAL_ROOT, PrefixForest
from deft_backend.policies.edges import BoolArray
from deft_backend.policies.policy import Rules, TwoRulePolicy
from deft_backend.policies.target import Target
from deft_backend.settings.policy_names import FASTTREE

WEIGHT_UNIT = 10_000
"""Weights are whole multiples of 1 / WEIGHT_UNIT, so that both planners compare exact integers."""


class EdgeCosts(NamedTuple):
    """FastTree's cost equations of an edge ``v -> l`` (cost-based greedy heuristic).

    ::

        Pad(TS, N)  = TS - ((N - 1) % TS + 1)
        C_P(nQ, len) = alpha · Pad(TS_q, nQ) · len + beta · nQ · max(0, TS_c - len)
        SplitKVCost  = C_P(nQ_curr, len_v) + C_P(nQ_l, len_l) + gamma · nQ_l
        SplitQCost   = C_P(nQ_curr - nQ_l, len_v) + C_P(nQ_l, len_v + len_l)

    The paper multiplies every term by ``d``, which decides nothing. In `C_P`, ``nQ`` counts query
    vectors, `vectors` for each query; ``gamma`` multiplies queries, as in the published artifact.
    """

    alpha: int
    beta: int
    gamma: int  # weights, in units of 1 / WEIGHT_UNIT
    vectors: int  # query vectors of a query
    tile_heights: tuple[int, ...]
    tile_tokens: tuple[int, ...]
    """[T] ``TS_q`` in query vectors and ``TS_c`` of each phase, ascending (multi-phase tiling). A
    group is in the first phase whose query tile holds it, or in the last."""

    @classmethod
    def of(cls, coefficients: FastTreeCoefficients, target: Target) -> EdgeCosts:
        """The equations on the tiles of the target's kernels."""
        alpha, beta, gamma = (
            round(weight * WEIGHT_UNIT)
            for weight in (coefficients.alpha, coefficients.beta, coefficients.gamma)
        )
        tiles = (target.tile_heights[:-1], target.tile_blocks[:-1])  # those of one segment
        return cls(alpha, beta, gamma, target.query_vectors, *tiles)

    def padding(self, queries: int, context: int) -> int:
        """``C_P``; 0 without queries or without context."""
        if queries == 0 or context == 0:
            return 0
        vectors = queries * self.vectors
        phase = 0
        while phase + 1 < len(self.tile_heights) and self.tile_heights[phase] < vectors:
            phase += 1
        short = max(0, self.tile_tokens[phase] - context)
        missing = -vectors % self.tile_heights[phase]
        return self.alpha * missing * context + self.beta * vectors * short


@dataclass(frozen=True)
class FastTree(TwoRulePolicy):
    """FastTree's context-query grouping as a binary edge assignment.

    Every edge ``v -> l`` gets 0 or 1. With 0 (*split KV*), parent and child are two groups, and the
    child's queries have one more partial result. With 1 (*split Q*), the child's queries leave the
    parent's group. They attend to the parent's context concatenated with the child's. A
    breadth-first search takes the cheaper choice for each edge; see :class:`EdgeCosts`. The nodes
    of a path follow one another in the page-table rows of its queries, so a concatenated context is
    one KV range.

    *Long-context splitting*: contexts are cut until no thread block is idle and no context outlasts
    the others. *Multi-phase tiling*: a group's phase is the smallest query tile that holds it.
    """

    name: ClassVar[str] = FASTTREE
    rules: ClassVar[Rules] = Rules("greedy", "filling")

    # alpha, beta and gamma; default those of the target's cost model.
    coefficients: FastTreeCoefficients | None = None

    def cut_edges(self, forest: PrefixForest, target: Target) -> BoolArray:
        costs = EdgeCosts.of(self.coefficients or target.costs.fasttree, target)
        return search_edges(forest, costs)


def search_edges(forest: PrefixForest, costs: EdgeCosts) -> BoolArray:
    """The greedy search: [N] whether the edge from each node's parent is cut (value 0).

    A node's edge depends on its parent's context and on the siblings before it. In depth-first
    order both are known, so one pass finds what a breadth-first search finds.
    """
    parent, queries = forest.parent.tolist(), forest.num_queries.tolist()
    length = forest.length.tolist()
    is_cut = np.ones(forest.num_nodes, dtype=np.bool_)
    remaining = queries.copy()
    context = length.copy()  # grows by concatenation
    for child, node in enumerate(parent):
        if node == VIRTUAL_ROOT:
            continue
        held = queries[child]
        split_kv = costs.padding(remaining[node], context[node]) + costs.gamma * held
        split_kv += costs.padding(held, context[child])
        split_q = costs.padding(remaining[node] - held, context[node])
        split_q += costs.padding(held, context[node] + context[child])
        if split_kv > split_q:
            is_cut[child] = False
            remaining[node] -= held
            context[child] += context[node]
    # An empty leaf that stays alone with its parent needs no group: the parent's ends where the
    # query's context ends. As its leaf, the parent's group grows with it.
    for child, node in enumerate(parent):
        if node != VIRTUAL_ROOT and length[child] == 0 and is_cut[child] and remaining[node] == 1:
            is_cut[child] = False
    return is_cut
