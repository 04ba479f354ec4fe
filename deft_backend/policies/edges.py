"""From the edges that a policy cuts to KV ranges, and from ranges to groups.

A node's range begins at the last cut edge on the path from the root. It ends where the node ends.
The range's queries are those of the node, without those of children that take its tokens along.
Siblings may stand in any order. So the children that stay stand first here: the queries of each
range are then neighbours. The device planner keeps the same order.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deft_backend.compile.host_jit import host_jit
from deft_backend.forest import Int32Array as Int32Array

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

ROOT = -1


class KVRanges(NamedTuple):
    """Groups of one KV range each, before cutting: ``R`` ranges in depth-first order."""

    node: Int64Array  # [R]: the node at whose end the range ends
    begin: Int64Array
    end: Int64Array  # [R]: tokens ``begin … end - 1`` of the context of the range's queries
    first: Int64Array
    queries: Int64Array  # [R]: the range's queries are ``order[first : first + queries]``
    order: Int32Array  # [B]: request indices


@host_jit
def grouped_ranges(
    parent: Int32Array, start: Int32Array, length: Int32Array, query_begin: Int32Array,
    query_end: Int32Array, is_leaf: BoolArray, order: Int32Array, is_cut: BoolArray,
) -> KVRanges:  # fmt: skip
    """The ranges of an edge assignment (FastTree, equation 2 and Figure 5).

    `is_cut` [N] tells whether the edge from each node's parent is cut; roots have none. The other
    arrays are those of :class:`~deft_backend.forest.PrefixForest`.
    """
    nodes = len(parent)
    kept = np.empty(nodes, dtype=np.int64)  # queries that stay with the node
    begin = np.empty(nodes, dtype=np.int64)
    for v in range(nodes):
        kept[v] = query_end[v] - query_begin[v]
        begin[v] = start[v]
        if parent[v] != ROOT and not is_cut[v]:
            begin[v] = begin[parent[v]]
            kept[parent[v]] -= kept[v]
    place = np.empty(nodes, dtype=np.int64)  # of the node's first query
    stays = np.zeros(nodes, dtype=np.int64)  # queries of the node's children so far, by kind
    leaves = np.zeros(nodes, dtype=np.int64)
    placed = np.empty_like(order)
    of_range = np.empty(nodes, dtype=np.int64)
    count = 0
    for v in range(nodes):
        queries = query_end[v] - query_begin[v]
        if parent[v] == ROOT:
            place[v] = query_begin[v]
        elif is_cut[v]:
            place[v] = place[parent[v]] + stays[parent[v]]
            stays[parent[v]] += queries
        else:
            place[v] = place[parent[v]] + kept[parent[v]] + leaves[parent[v]]
            leaves[parent[v]] += queries
        if is_leaf[v]:
            placed[place[v]] = order[query_begin[v]]
        if kept[v] > 0:
            of_range[count] = v
            count += 1
    node = of_range[:count]
    end = np.empty(count, dtype=np.int64)
    for r in range(count):
        end[r] = np.int64(start[node[r]]) + length[node[r]]
    return KVRanges(node, begin[node], end, place[node], kept[node], placed)


@host_jit
def cut_ranges(
    ranges: KVRanges, is_leaf: BoolArray, num_chunks: Int64Array, unit: int
) -> tuple[Int32Array, Int32Array, Int32Array, Int32Array, Int32Array, BoolArray]:
    """Cut ranges evenly into chunks of whole units, one group for each chunk.

    A range gets `num_chunks` [R] chunks, but no more than it has units. A unit has `unit` tokens,
    those of the KV block as a rule; a range's last unit may be shorter.

    Returns fields of :class:`~deft_backend.policies.Grouping`, with one segment for each group.
    """
    count = len(ranges.node)
    chunks = np.empty(count, dtype=np.int64)
    groups = 0
    pairs = 0
    for r in range(count):
        units = (ranges.end[r] - ranges.begin[r] + unit - 1) // unit
        chunks[r] = max(np.int64(1), min(num_chunks[r], units))
        groups += chunks[r]
        pairs += chunks[r] * ranges.queries[r]
    query_ptr = np.zeros(groups + 1, dtype=np.int32)
    queries = np.empty(pairs, dtype=np.int32)
    request = np.empty(groups, dtype=np.int32)
    start = np.empty(groups, dtype=np.int32)
    end = np.empty(groups, dtype=np.int32)
    is_open = np.empty(groups, dtype=np.bool_)
    g = 0
    e = 0
    for r in range(count):
        units = (ranges.end[r] - ranges.begin[r] + unit - 1) // unit
        first = ranges.first[r]
        for chunk in range(chunks[r]):
            request[g] = ranges.order[first]
            start[g] = ranges.begin[r] + chunk * units // chunks[r] * unit
            stop = ranges.begin[r] + (chunk + 1) * units // chunks[r] * unit
            end[g] = min(ranges.end[r], stop)
            is_open[g] = is_leaf[ranges.node[r]] and chunk + 1 == chunks[r]
            for query in range(first, first + ranges.queries[r]):
                queries[e] = ranges.order[query]
                e += 1
            query_ptr[g + 1] = e
            g += 1
    return query_ptr, queries, request, start, end, is_open
