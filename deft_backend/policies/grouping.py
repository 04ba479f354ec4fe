"""A policy's output: groups of KV ranges with the queries that read them together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deft_backend.forest import Int32Array


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
