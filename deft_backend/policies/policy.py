"""The contract of a policy, and the policies that are two rules."""

from abc import ABC, abstractmethod
from operator import sub
from typing import ClassVar, NamedTuple

import numpy as np

from deft_backend.forest import PrefixForest
from deft_backend.policies.chunk_choice import Machine, choose_chunks, tiles_of
from deft_backend.policies.edges import BoolArray, KVRanges, cut_ranges, grouped_ranges
from deft_backend.policies.grouping import Grouping, Int64Array
from deft_backend.policies.target import Limits, Target, check_limits

FLATTENED = "flattened"
"""The rule of edges of `deft-flatten`: nodes are cut where even chunks of the forest end."""

EDGE_RULES = ("none", "all", "greedy", "measured", FLATTENED)
"""The rules of edges that the device planner knows."""

ABSOLUTE = "absolute"
"""The rule of chunks of `invariant`: a request's length decides where they begin."""

CHUNK = 512
"""For the rule ``absolute``: tokens of each of a request's first chunks."""

PER_OCTAVE = 16
"""For the rule ``absolute``: chunks of an octave, within which chunks are equally long."""

PARTS = 8
"""For the rule ``absolute``: a request's end is cut at multiples of this part of a chunk."""


class Rules(NamedTuple):
    """A policy's two rules, by the names under which the device planner knows them."""

    edges: str  # which edges are cut; one of :data:`EDGE_RULES`
    # One of :data:`~deft_backend.policies.chunk_choice.CHUNK_RULES`, or :data:`ABSOLUTE`.
    chunks: str
    # Tokens of a chunk for the rule ``fixed``; for ``absolute``, of all short chunks.
    chunk_tokens: int = 0


class Policy(ABC):
    """A rule that groups KV and queries. Policies hold parameters, never state.

    The reference plans by :meth:`group`, the device planner by `rules`.
    """

    name: ClassVar[str]  # by which users select the policy
    several_segments: ClassVar[bool] = False
    """Whether some groups have several segments, so that their items need the masked tile."""

    def __str__(self) -> str:
        return self.name

    @property
    def rules(self) -> Rules | None:
        """What the device planner follows; None: only the reference does, so no server runs it."""
        return None

    @abstractmethod
    def group(self, forest: PrefixForest, target: Target) -> Grouping:
        """Group `forest`'s KV with the queries that attend to it.

        Every query attends to exactly its own tokens, each once. The segment that ends a query's
        context is open, so the plan stays right when the request grows. Empty leaves have an open
        segment of no tokens for the same reason.

        Raises DoesNotFit if the groups would exceed the target's limits, and PolicyError if the
        policy cannot work with this target.
        """


class TwoRulePolicy(Policy):
    """A policy that is two decisions: which edges of the forest are cut, and how long chunks are.

    An edge leads from a node to its child. If it is cut, the two are groups of their own, and the
    child's queries have one more partial result (KV-guided grouping, DeFT section 3.3). If not, the
    child's queries leave the node's group and read the node's tokens with their own (FastTree: edge
    assignment). :mod:`~deft_backend.policies.edges` turns edges into KV ranges,
    :mod:`~deft_backend.policies.chunk_choice` cuts these. The device planner has the same rules.
    """

    @property
    @abstractmethod
    def rules(self) -> Rules: ...

    def cut_edges(self, forest: PrefixForest, target: Target) -> BoolArray:
        """[N] for each node, whether the edge from its parent is cut. Roots have no such edge.

        Policies whose rule is neither ``all`` nor ``none`` override this.
        """
        return np.full(forest.num_nodes, self.rules.edges == "all")

    def divided_ranges(self, forest: PrefixForest, target: Target) -> tuple[KVRanges, Int64Array]:
        """The KV ranges, and the number of chunks [R] of each."""
        ranges = grouped_ranges(forest, self.cut_edges(forest, target))
        machine = Machine(target, forest.batch_size)
        items = int(tiles_of(ranges.queries, machine.tile_queries).sum())
        needed = Limits(items, int(ranges.queries.sum()), segments=items)
        check_limits(self.name, needed, target)
        spare = Limits(*map(sub, target.limits, needed))
        _, rule, unit = self.rules
        tokens = ranges.end - ranges.begin
        return ranges, choose_chunks(rule, unit, ranges.queries, tokens, machine, spare)

    def group(self, forest: PrefixForest, target: Target) -> Grouping:
        ranges, num_chunks = self.divided_ranges(forest, target)
        unit = self.rules.chunk_tokens or target.block_tokens
        return cut_ranges(ranges, forest.is_leaf, num_chunks, unit)
