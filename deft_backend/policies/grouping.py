"""A policy's output: groups of KV ranges with the queries that read them together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deft_backend.forest import Int32Array


def concatenated_ranges(
    begin: npt.NDArray[np.integer], count: npt.NDArray[np.integer]
) -> npt.NDArray[np.int64]:
    """``begin[0], begin[0] + 1, …`` (``count[0]`` numbers), then likewise for each other
    element."""
    count = count.astype(np.int64)
    shift = begin - np.cumsum(count) + count
    numbers: npt.NDArray[np.int64] = np.arange(int(count.sum())) + np.repeat(shift, count)
    return numbers


class Segment(NamedTuple):
    """A KV range inside a group, with its span."""

    request: int
    start: int
    end: int  # positions ``start … end - 1`` of the context of the request with this index
    open: bool
    """Whether the range ends where its request currently ends. Then `end` is the request's end at
    the time the forest was built."""
    attend_begin: int
    attend_end: int
    """The span: the group's queries ``attend_begin … attend_end - 1`` attend to the range."""


@dataclass(frozen=True, eq=False)
class Grouping:
    """Groups of KV and queries, the output of a policy.

    The kernels load a group's KV once for all of its queries (KV-guided grouping, DeFT section
    3.3). The KV is one range, or several that follow one another in the depth-first flattened
    forest. A group's queries are in forest order, so the queries that attend to a range are a run
    of them. Two integers therefore replace DeFT's bit causal mask (Remark 3.1). All arrays are
    NumPy arrays; ``G`` groups, ``S`` segments.
    """

    query_ptr: Int32Array
    """[G + 1]: queries of group ``g`` are ``queries[query_ptr[g] : query_ptr[g + 1]]``."""
    queries: Int32Array  # request indices
    segment_ptr: Int32Array  # [G + 1]: segments of group ``g``
    request: Int32Array
    start: Int32Array
    end: Int32Array
    """[S]: each segment's tokens: positions ``start … end - 1`` of a request's context."""
    open: npt.NDArray[np.bool_]  # [S]: whether the segment ends where its request currently ends
    attend_begin: Int32Array
    attend_end: Int32Array  # [S]: the run of the group's queries that attend to each segment

    @classmethod
    def of_single_ranges(
        cls, query_ptr: Int32Array, queries: Int32Array, request: Int32Array, start: Int32Array,
        end: Int32Array, is_open: npt.NDArray[np.bool_],
    ) -> Grouping:  # fmt: skip
        """Groups of one segment each, to which all of their queries attend."""
        groups = len(request)
        segment_ptr = np.arange(groups + 1, dtype=np.int32)
        all_from = np.zeros(groups, dtype=np.int32)
        count = query_ptr[1:] - query_ptr[:-1]
        return cls(query_ptr, queries, segment_ptr, request, start, end, is_open, all_from, count)

    @property
    def num_groups(self) -> int:
        return len(self.query_ptr) - 1

    @property
    def several_ranges(self) -> npt.NDArray[np.bool_]:
        """[G] whether a group has several segments, or a query that skips a segment."""
        several: npt.NDArray[np.bool_] = np.diff(self.segment_ptr) != 1
        owner = np.repeat(np.arange(self.num_groups), np.diff(self.segment_ptr))
        partly = (self.attend_begin > 0) | (self.attend_end < self.num_queries()[owner])
        several[owner[partly]] = True
        return several

    def group_queries(self, group: int) -> Int32Array:
        """Request indices of the queries of `group`."""
        return self.queries[self.query_ptr[group] : self.query_ptr[group + 1]]

    def segments(self, group: int) -> Iterator[Segment]:
        """The KV ranges of `group`."""
        for s in range(int(self.segment_ptr[group]), int(self.segment_ptr[group + 1])):
            arrays = (self.request, self.start, self.end, self.open, self.attend_begin,
                      self.attend_end)  # fmt: skip
            yield Segment(*(array[s].item() for array in arrays))

    def num_queries(self) -> Int32Array:
        """[G] queries of each group."""
        return self.query_ptr[1:] - self.query_ptr[:-1]

    def num_tokens(self) -> npt.NDArray[np.int64]:
        """[G] KV tokens of each group when the forest was built."""
        length = (self.end - self.start).astype(np.int64)
        total: npt.NDArray[np.int64] = np.concatenate(([0], np.cumsum(length)))
        tokens: npt.NDArray[np.int64] = total[self.segment_ptr[1:]] - total[self.segment_ptr[:-1]]
        return tokens


class GroupingBuilder:
    """Builds a :class:`Grouping` group by group."""

    def __init__(self) -> None:
        self._query_ptr = [0]
        self._queries: list[int] = []
        self._segment_ptr = [0]
        self._segments: list[Segment] = []

    def add(self, queries: Sequence[int] | Int32Array, segments: Sequence[Segment]) -> None:
        """Add a group; `queries` are request indices in forest order."""
        self._queries.extend(int(q) for q in queries)
        self._query_ptr.append(len(self._queries))
        self._segments += segments
        self._segment_ptr.append(len(self._segments))

    def build(self) -> Grouping:
        held = np.array(self._segments, dtype=np.int32).reshape(-1, len(Segment._fields))
        request, start, end, is_open, attend_begin, attend_end = held.T.copy()
        query_ptr, queries, segment_ptr = (
            np.array(numbers, dtype=np.int32)
            for numbers in (self._query_ptr, self._queries, self._segment_ptr)
        )
        return Grouping(
            query_ptr, queries, segment_ptr, request, start, end, is_open.astype(bool),
            attend_begin, attend_end,
        )  # fmt: skip
