"""FastTree's cost equations: padding, intermediate results, and both values of an edge."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from deft_backend.costs.cost_model import FastTreeCoefficients


def pad(tile: int, size: int) -> int:
    """``Pad(TS, N) = TS - ((N - 1) % TS + 1)``: padding elements of the last tile."""
    return tile - ((size - 1) % tile + 1)


def query_padding_cost(tile_queries: int, num_queries: int, length: int, head_dim: int) -> int:
    """``C_{P,q}(nQ, len) = Pad(TS_q, nQ) · len · d``."""
    return pad(tile_queries, num_queries) * length * head_dim


def context_padding_cost(tile_tokens: int, num_queries: int, length: int, head_dim: int) -> int:
    """``C_{P,c}(nQ, len) = nQ · Pad(TS_c, min(len, TS_c)) · d``."""
    return num_queries * pad(tile_tokens, min(length, tile_tokens)) * head_dim


@dataclass(frozen=True)
class FastTreeCosts:
    """The costs of an edge ``v -> l`` (FastTree, cost-based greedy heuristic).

    ::

        C_P(nQ, len)  = alpha · C_{P,q}(nQ, len) + beta · C_{P,c}(nQ, len)
        SplitKVCost   = C_P(nQ_curr, len_v) + C_P(nQ_l, len_l) + gamma · nQ_l · d
        SplitQCost    = C_P(nQ_curr - nQ_l, len_v) + C_P(nQ_l, len_v + len_l)

    Arguments are queries and tokens. A query has ``g`` query vectors in a tile if ``g`` query heads
    share a KV head. So ``nQ`` in the equations counts query vectors; with ``g = 1`` (MHA) they are
    the paper's equations.

    Attributes
    ----------
    coefficients : FastTreeCoefficients
        alpha, beta, gamma.
    phases : tuple of (TS_q, TS_c)
        Tile sizes of each phase in query vectors and tokens, ascending (multi-phase tiling). A
        group is in the first phase whose query tile holds it, or in the last phase.
    head_dim : int
        ``d``.
    gqa_group : int
        Query heads that share a KV head.
    """

    coefficients: FastTreeCoefficients
    phases: tuple[tuple[int, int], ...]
    head_dim: int
    gqa_group: int = 1
    _padding: dict[tuple[int, int], float] = field(default_factory=dict, repr=False, compare=False)

    def phase(self, rows: int) -> tuple[int, int]:
        """Tile sizes ``(TS_q, TS_c)`` of a group of `rows` query vectors."""
        at = bisect_left(self.phases, rows, key=lambda tile: tile[0])
        return self.phases[min(at, len(self.phases) - 1)]

    def padding(self, num_queries: int, length: int) -> float:
        """``C_P(nQ, len)``; 0 without queries or without context."""
        known = self._padding.get((num_queries, length))
        if known is None:
            rows = num_queries * self.gqa_group
            known = 0.0
            if rows and length:
                tile_queries, tile_tokens = self.phase(rows)
                known = self.coefficients.alpha * query_padding_cost(
                    tile_queries, rows, length, self.head_dim
                ) + self.coefficients.beta * context_padding_cost(
                    tile_tokens, rows, length, self.head_dim
                )
            self._padding[num_queries, length] = known
        return known

    def reduction(self, num_queries: int) -> float:
        """``SplitKVCost_R = gamma · nQ_l · d``: the child's intermediate results."""
        return self.coefficients.gamma * num_queries * self.gqa_group * self.head_dim

    def split_kv(self, remaining: int, queries: int, length_v: int, length_l: int) -> float:
        """Cost of 0: ``v`` keeps its `remaining` queries, ``l`` is a group of its own."""
        return (
            self.padding(remaining, length_v)
            + self.padding(queries, length_l)
            + self.reduction(queries)
        )

    def split_q(self, remaining: int, queries: int, length_v: int, length_l: int) -> float:
        """Cost of 1: the `queries` of ``l`` leave ``v`` and take its context along."""
        return self.padding(remaining - queries, length_v) + self.padding(
            queries, length_v + length_l
        )
