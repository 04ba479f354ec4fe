"""From the edges that a policy cuts to KV ranges, and from ranges to groups.

A node's range begins at the last cut edge on the path from the root. It ends where the node ends.
The range's queries are those of the node, without those of children that take its tokens along.
Siblings may stand in any order. So the children that stay stand first here: the queries of each
range are then neighbours. The device planner keeps the same order.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deft_backend.forest import VIRTUAL_ROOT, Int32Array, PrefixForest
from deft_backend.policies.grouping import Grouping, Int64Array, concatenated_ranges

BoolArray = npt.NDArray[np.bool_]


class KVRanges(NamedTuple):
    """Groups of one KV range each, before cutting: ``R`` ranges in depth-first order."""

    node: Int64Array  # [R]: the node at whose end the range ends
    begin: Int64Array
    end: Int64Array  # [R]: tokens ``begin … end - 1`` of the context of the range's queries
    first: Int64Array
    queries: Int64Array  # [R]: the range's queries are ``order[first : first + queries]``
    order: Int32Array  # [B]: request indices


def grouped_ranges(forest: PrefixForest, is_cut: BoolArray) -> KVRanges:
    """The ranges of an edge assignment [N] from each node's parent (FastTree, equation 2, Figure
    5).
    """
    parent, queries = forest.parent.tolist(), forest.num_queries.tolist()
    own = [above == VIRTUAL_ROOT or cut for above, cut in zip(parent, is_cut.tolist(), strict=True)]
    kept = queries.copy()  # queries that stay with the node
    begin = forest.start.tolist()
    for v, above in enumerate(parent):
        if not own[v]:
            begin[v] = begin[above]
            kept[above] -= queries[v]
    place = forest.query_begin.tolist()  # of the node's first query
    stay, leave = place.copy(), place.copy()  # where the node's next child of either kind goes
    for v, above in enumerate(parent):
        if above != VIRTUAL_ROOT:
            free = stay if own[v] else leave
            place[v] = free[above]
            free[above] += queries[v]
        stay[v], leave[v] = place[v], place[v] + kept[v]

    first, held = np.array(place, dtype=np.int64), np.array(kept, dtype=np.int64)
    order = np.empty_like(forest.order)
    order[first[forest.leaf]] = forest.order
    node = np.flatnonzero(held)
    begins, ends = np.array(begin, dtype=np.int64)[node], forest.end[node].astype(np.int64)
    return KVRanges(node, begins, ends, first[node], held[node], order)


def cut_ranges(ranges: KVRanges, is_leaf: BoolArray, chunks: Int64Array, unit: int) -> Grouping:
    """Cut ranges evenly into chunks of whole units, one group for each chunk.

    - `chunks` [R]: chunks of each range: at least one, and no more than it has units.
    - `unit`: tokens of a unit, those of the KV block as a rule; a range's last unit may be shorter.
    """
    of = np.repeat(np.arange(len(chunks)), chunks)  # the range of each group
    chunk = concatenated_ranges(np.zeros_like(chunks), chunks)
    begin, chunks = ranges.begin[of], chunks[of]
    units = -(-(ranges.end[of] - begin) // unit)
    start, stop = (begin + at * units // chunks * unit for at in (chunk, chunk + 1))
    return groups_of(ranges, of, start, stop, is_leaf[ranges.node[of]] & (chunk + 1 == chunks))


def groups_of(
    ranges: KVRanges, of: Int64Array, start: Int64Array, stop: Int64Array, is_open: BoolArray
) -> Grouping:
    """Groups [G] of one KV range each: tokens ``start … stop - 1`` of the range `of`. All of a
    group's queries attend to its range.
    """
    queries = ranges.queries[of]
    return Grouping(
        query_ptr=np.append(0, np.cumsum(queries)).astype(np.int32),
        queries=ranges.order[concatenated_ranges(ranges.first[of], queries)],
        segment_ptr=np.arange(len(of) + 1, dtype=np.int32),
        request=ranges.order[ranges.first[of]],
        start=start.astype(np.int32),
        end=np.minimum(ranges.end[of], stop).astype(np.int32),
        open=is_open,
        attend_begin=np.zeros(len(of), dtype=np.int32),
        attend_end=queries.astype(np.int32),
    )
