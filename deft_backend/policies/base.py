"""What a policy decides (:class:`Grouping`), what it may look at (:class:`Target`), its role."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from deft_backend.forest import Int32Array, PrefixForest

if TYPE_CHECKING:
    from deft_backend.policies.cost_model import CostModel


class PolicyError(ValueError):
    """An unknown policy, or parameters it cannot work with."""


class Segment(NamedTuple):
    """A contiguous range of one row's tokens inside a group.

    ``open`` ranges end where the row's sequence currently ends; `end` is where that was when the
    plan was made. The group's queries number ``attend_begin … attend_end - 1`` attend to the range.
    """

    row: int
    start: int
    end: int
    open: bool
    attend_begin: int
    attend_end: int


@dataclass(frozen=True, eq=False)
class Grouping:
    """Groups of KV and queries, the output of a policy.

    A group's KV is loaded once for all of its queries (KV-guided grouping, DeFT section 3.3). It
    is one range of one row, or several ranges that follow one another in the depth-first flattened
    forest. Queries stand in forest order, so those that attend to a range are a run of the
    group's queries: DeFT's bit causal mask (Remark 3.1) as two integers. All arrays live on the
    host; ``G`` groups, ``S`` segments.

    Attributes
    ----------
    query_ptr : [G + 1] int32
        Queries of group ``g`` are ``queries[query_ptr[g] : query_ptr[g + 1]]``.
    queries : int32
        Batch rows.
    segment_ptr : [G + 1] int32
        Segments of group ``g``.
    row, start, end : [S] int32
        Each segment's tokens: positions ``start … end - 1`` of batch row ``row``.
    open : [S] bool
        Whether the segment ends where its row's sequence currently ends.
    attend_begin, attend_end : [S] int32
        The run of the group's queries that attend to each segment.
    """

    query_ptr: Int32Array
    queries: Int32Array
    segment_ptr: Int32Array
    row: Int32Array
    start: Int32Array
    end: Int32Array
    open: npt.NDArray[np.bool_]
    attend_begin: Int32Array
    attend_end: Int32Array

    @property
    def num_groups(self) -> int:
        return len(self.query_ptr) - 1

    @property
    def several_ranges(self) -> npt.NDArray[np.bool_]:
        """[G] whether a group is more than one KV range that all of its queries attend to."""
        several: npt.NDArray[np.bool_] = np.diff(self.segment_ptr) != 1
        owner = np.repeat(np.arange(self.num_groups), np.diff(self.segment_ptr))
        partly = (self.attend_begin > 0) | (self.attend_end < self.num_queries()[owner])
        several[owner[partly]] = True
        return several

    def group_queries(self, group: int) -> Int32Array:
        """Batch rows of the queries of `group`."""
        return self.queries[self.query_ptr[group] : self.query_ptr[group + 1]]

    def segments(self, group: int) -> Iterator[Segment]:
        """The KV ranges of `group`."""
        for s in range(int(self.segment_ptr[group]), int(self.segment_ptr[group + 1])):
            yield Segment(
                row=int(self.row[s]),
                start=int(self.start[s]),
                end=int(self.end[s]),
                open=bool(self.open[s]),
                attend_begin=int(self.attend_begin[s]),
                attend_end=int(self.attend_end[s]),
            )

    def num_queries(self) -> Int32Array:
        """[G] queries of each group."""
        return self.query_ptr[1:] - self.query_ptr[:-1]

    def num_tokens(self) -> npt.NDArray[np.int64]:
        """[G] KV tokens of each group, as of when the forest was built."""
        length = (self.end - self.start).astype(np.int64)
        total: npt.NDArray[np.int64] = np.concatenate(([0], np.cumsum(length)))
        tokens: npt.NDArray[np.int64] = total[self.segment_ptr[1:]] - total[self.segment_ptr[:-1]]
        return tokens


class GroupingBuilder:
    """Collects groups one by one; :meth:`build` makes the arrays."""

    def __init__(self) -> None:
        self._query_ptr = [0]
        self._queries: list[int] = []
        self._segment_ptr = [0]
        self._row: list[int] = []
        self._start: list[int] = []
        self._end: list[int] = []
        self._open: list[bool] = []
        self._attend_begin: list[int] = []
        self._attend_end: list[int] = []

    def add(self, queries: Sequence[int] | Int32Array, segments: Sequence[Segment]) -> None:
        """Add a group; `queries` are batch rows."""
        self._queries.extend(int(q) for q in queries)
        self._query_ptr.append(len(self._queries))
        for segment in segments:
            self._row.append(segment.row)
            self._start.append(segment.start)
            self._end.append(segment.end)
            self._open.append(segment.open)
            self._attend_begin.append(segment.attend_begin)
            self._attend_end.append(segment.attend_end)
        self._segment_ptr.append(len(self._row))

    def build(self) -> Grouping:
        return Grouping(
            query_ptr=np.array(self._query_ptr, dtype=np.int32),
            queries=np.array(self._queries, dtype=np.int32),
            segment_ptr=np.array(self._segment_ptr, dtype=np.int32),
            row=np.array(self._row, dtype=np.int32),
            start=np.array(self._start, dtype=np.int32),
            end=np.array(self._end, dtype=np.int32),
            open=np.array(self._open, dtype=bool),
            attend_begin=np.array(self._attend_begin, dtype=np.int32),
            attend_end=np.array(self._attend_end, dtype=np.int32),
        )


@dataclass(frozen=True)
class Target:
    """The attention and the machine that a policy plans for.

    Attributes
    ----------
    num_query_heads, num_kv_heads, head_dim, dtype_bytes : int
        Shape of the attention; bytes of one element of the KV cache.
    num_programs : int
        Thread blocks that run at once for each KV head (about the number of SMs times the blocks
        an SM holds, over the KV heads).
    tile_rows : tuple of int
        Rows of the query tiles the kernels offer: ascending for groups of one range, and last the
        tile for groups of several. A row is one (query, query head of the GQA group) pair, so a
        tile of ``r`` rows serves ``r // gqa_group`` queries.
    tile_programs : tuple of int
        Thread blocks that run at once for each KV head, by tile shape.
    num_sms : int
        SMs of the GPU, which hold those thread blocks.
    tile_segments : tuple of int
        KV ranges that one item of each tile shape may have.
    block_tokens : int
        KV tokens a kernel loads at a time.
    max_groups, max_group_queries : int
        Most groups and most (group, query) pairs the plan's arrays can hold.
    cost_model : CostModel, optional
        Profiled costs of partial attention; None takes the table shipped with the package.
    """

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int = 2
    num_programs: int = 132
    tile_rows: tuple[int, ...] = (8, 64, 64)
    tile_programs: tuple[int, ...] = (132, 33, 33)
    num_sms: int = 132
    tile_segments: tuple[int, ...] = (1, 1, 32)
    block_tokens: int = 64
    max_groups: int = 1 << 30
    max_group_queries: int = 1 << 30
    cost_model: CostModel | None = field(default=None, compare=False)

    @property
    def gqa_group(self) -> int:
        """Query heads that share one KV head."""
        return self.num_query_heads // self.num_kv_heads

    @property
    def largest_tile(self) -> int:
        """Queries that the largest tile serves."""
        return max(self.tile_rows) // self.gqa_group

    @cached_property
    def single_range_tiles(self) -> tuple[int, ...]:
        """Queries that each tile shape for one KV range serves, ascending (0: none)."""
        single = zip(self.tile_queries, self.tile_segments, strict=True)
        return tuple(queries for queries, segments in single if segments == 1)

    @cached_property
    def tile_queries(self) -> tuple[int, ...]:
        """Queries that each tile shape serves, ascending."""
        return tuple(rows // self.gqa_group for rows in self.tile_rows)

    def within(self, max_groups: int, max_group_queries: int) -> Target:
        """The same target with no more groups and (group, query) pairs than given."""
        # Every plan asks for it, and `replace` takes longer than choosing the plan's ranges.
        found = object.__new__(type(self))
        found.__dict__.update(
            self.__dict__,
            max_groups=min(self.max_groups, max_groups),
            max_group_queries=min(self.max_group_queries, max_group_queries),
        )
        return found


class Policy(Protocol):
    """A way of grouping KV and queries. Policies hold parameters, never state."""

    @property
    def name(self) -> str:
        """As selected by the user; the key in the registry."""
        ...

    def group(self, forest: PrefixForest, target: Target) -> Grouping:
        """Group `forest`'s KV with the queries that attend to it.

        Every query attends to exactly its own tokens, each once. The segment that ends a query's
        context is open. A query whose leaf is empty still gets an open segment there, alone or
        behind the node before it, so that the plan stays right when the request grows.
        """
        ...
