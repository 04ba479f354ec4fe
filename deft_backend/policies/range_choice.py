"""The compiled code of `auto`: choose which nodes get their own KV ranges, and cut ranges."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from deft_backend.compile.host_jit import host_jit

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]

ROOT = -1


@host_jit
def shape_of(queries: int, tile_queries: Int64Array) -> int:
    """Tile shape of a group: the smallest tile that holds its queries, or the last."""
    shape = 0
    while shape + 1 < len(tile_queries) and tile_queries[shape] < queries:
        shape += 1
    return shape


@host_jit
def choose_ranges(
    parent: Int32Array,
    start: Int32Array,
    length: Int32Array,
    query_begin: Int32Array,
    query_end: Int32Array,
    is_leaf: BoolArray,
    tile_queries: Int64Array,
    programs: Int64Array,
    costs: FloatArray,
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Choose which nodes get KV ranges of their own (FastTree, edge assignment).

    The function goes from the root down and compares two ways to read a node's tokens. Either they
    get their own items, whose partial results must be merged. Or every item below the node reads
    them as part of a longer range. The cheaper way for the GPU wins. Leaves always get a range.

    Parameters
    ----------
    parent, start, length, query_begin, query_end, is_leaf : [N]
        As in :class:`~deft_backend.forest.PrefixForest`.
    tile_queries, programs : [T] int64
        Queries that each tile shape holds, ascending, and programs of each that run at once.
    costs : [2 T + 2] float64
        :meth:`TileCosts.as_array() <deft_backend.costs.TileCosts.as_array>`, in nanoseconds.

    Returns
    -------
    node, begin, end : [R] int64
        Ranges: tokens from `begin` to `end` of the context of all queries of `node`.
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
        token[t] = costs[shapes + t] / busy
    partial = costs[2 * shapes]

    # Time to read one token below each node: once for every tile of every child.
    below = np.zeros(nodes)
    own = np.empty(nodes)
    for v in range(nodes):
        queries = query_end[v] - query_begin[v]
        shape = shape_of(queries, tile_queries)
        tiles = (queries + tile_queries[shape] - 1) // tile_queries[shape]
        own[v] = tiles * token[shape]
        if parent[v] != ROOT:
            below[parent[v]] += own[v]

    base = np.zeros(nodes, dtype=np.int64)  # first token of the ranges below each node
    merged = np.zeros(nodes, dtype=np.bool_)  # whether queries have a partial result from above
    node_of = np.empty(nodes, dtype=np.int64)
    begin_of = np.empty(nodes, dtype=np.int64)
    end_of = np.empty(nodes, dtype=np.int64)
    count = 0
    for v in range(nodes):
        begin = base[parent[v]] if parent[v] != ROOT else 0
        end = np.int64(start[v]) + length[v]
        if is_leaf[v]:
            node_of[count] = v
            begin_of[count] = begin
            end_of[count] = end
            count += 1
            continue
        has_partials = parent[v] != ROOT and merged[parent[v]]
        base[v] = begin
        merged[v] = has_partials
        tokens = end - begin
        if tokens == 0:
            continue
        queries = query_end[v] - query_begin[v]
        shape = shape_of(queries, tile_queries)
        tiles = (queries + tile_queries[shape] - 1) // tile_queries[shape]
        results = queries if has_partials else 2 * queries
        if tokens * own[v] + tiles * item[shape] + results * partial < tokens * below[v]:
            node_of[count] = v
            begin_of[count] = begin
            end_of[count] = begin + tokens
            count += 1
            base[v] = begin + tokens
            merged[v] = True
    return node_of[:count], begin_of[:count], end_of[:count]


@host_jit
def cut_ranges(
    node: Int64Array,
    begin: Int64Array,
    end: Int64Array,
    request: Int32Array,
    query_begin: Int32Array,
    query_end: Int32Array,
    is_leaf: BoolArray,
    order: Int32Array,
    tile_queries: Int64Array,
    chunk_tokens: Int64Array,
    block: int,
) -> tuple[Int32Array, Int32Array, Int32Array, Int32Array, Int32Array, BoolArray, Int32Array]:
    """Cut ranges into even chunks of whole KV blocks, one group for each chunk.

    Parameters
    ----------
    node, begin, end : [R] int64
        Ranges of :func:`choose_ranges`.
    request, query_begin, query_end, is_leaf, order
        As in :class:`~deft_backend.forest.PrefixForest`.
    tile_queries, chunk_tokens : [T] int64
        Queries that each tile shape holds, and most tokens of its chunks.
    block : int
        Tokens of a KV block.

    Returns
    -------
    query_ptr, queries, request, start, end, open
        As in :class:`~deft_backend.policies.Grouping`, with one segment for each group.
    count : [G] int32
        Queries of each group.
    """
    groups = 0
    pairs = 0
    num_chunks = np.empty(len(node), dtype=np.int64)
    for r in range(len(node)):
        queries = query_end[node[r]] - query_begin[node[r]]
        chunk = chunk_tokens[shape_of(queries, tile_queries)]
        num_chunks[r] = max(np.int64(1), (end[r] - begin[r] + chunk - 1) // chunk)
        groups += num_chunks[r]
        pairs += num_chunks[r] * queries
    query_ptr = np.zeros(groups + 1, dtype=np.int32)
    queries_of = np.empty(pairs, dtype=np.int32)
    group_request = np.empty(groups, dtype=np.int32)
    group_start = np.empty(groups, dtype=np.int32)
    group_end = np.empty(groups, dtype=np.int32)
    group_open = np.empty(groups, dtype=np.bool_)
    count = np.empty(groups, dtype=np.int32)
    g = 0
    e = 0
    for r in range(len(node)):
        v = node[r]
        blocks = (end[r] - begin[r] + block - 1) // block
        for p in range(num_chunks[r]):
            group_request[g] = request[v]
            group_start[g] = begin[r] + p * blocks // num_chunks[r] * block
            group_end[g] = min(end[r], begin[r] + (p + 1) * blocks // num_chunks[r] * block)
            group_open[g] = is_leaf[v] and p + 1 == num_chunks[r]
            count[g] = query_end[v] - query_begin[v]
            for q in range(query_begin[v], query_end[v]):
                queries_of[e] = order[q]
                e += 1
            query_ptr[g + 1] = e
            g += 1
    return query_ptr, queries_of, group_request, group_start, group_end, group_open, count
