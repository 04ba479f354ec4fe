"""Which KV ranges get items of their own, and how ranges are cut: `auto`, compiled."""

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
    """Ranges as (node, begin, end): those tokens of the node's row, for all of its queries.

    From the root down, a node's tokens either get items of their own, whose partial results must
    be merged, or are read by every item below the node, as a longer range of the same row. The
    cheaper way is taken, counted in time of the whole GPU. Leaves always have a range.
    """
    shapes = len(tile_queries)
    nodes = len(parent)
    token = np.empty(shapes)
    item = np.empty(shapes)
    leaves = np.int64(0)
    for v in range(nodes):
        leaves += is_leaf[v]
    for t in range(shapes):
        # A few requests do not fill the GPU: what each of them reads takes all the longer.
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

    base = np.zeros(nodes, dtype=np.int64)  # where the ranges below a node begin
    merged = np.zeros(nodes, dtype=np.bool_)  # whether a range above leaves partial results
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
    row: Int32Array,
    query_begin: Int32Array,
    query_end: Int32Array,
    is_leaf: BoolArray,
    order: Int32Array,
    tile_queries: Int64Array,
    chunk_tokens: Int64Array,
    block: int,
) -> tuple[Int32Array, Int32Array, Int32Array, Int32Array, Int32Array, BoolArray, Int32Array]:
    """Ranges in even chunks: query_ptr, queries, row, start, end, open and queries a group."""
    groups = 0
    pairs = 0
    pieces = np.empty(len(node), dtype=np.int64)
    for r in range(len(node)):
        queries = query_end[node[r]] - query_begin[node[r]]
        chunk = chunk_tokens[shape_of(queries, tile_queries)]
        pieces[r] = max(np.int64(1), (end[r] - begin[r] + chunk - 1) // chunk)
        groups += pieces[r]
        pairs += pieces[r] * queries
    query_ptr = np.zeros(groups + 1, dtype=np.int32)
    queries_of = np.empty(pairs, dtype=np.int32)
    group_row = np.empty(groups, dtype=np.int32)
    group_start = np.empty(groups, dtype=np.int32)
    group_end = np.empty(groups, dtype=np.int32)
    group_open = np.empty(groups, dtype=np.bool_)
    count = np.empty(groups, dtype=np.int32)
    g = 0
    e = 0
    for r in range(len(node)):
        v = node[r]
        blocks = (end[r] - begin[r] + block - 1) // block
        for p in range(pieces[r]):
            group_row[g] = row[v]
            group_start[g] = begin[r] + p * blocks // pieces[r] * block
            group_end[g] = min(end[r], begin[r] + (p + 1) * blocks // pieces[r] * block)
            group_open[g] = is_leaf[v] and p + 1 == pieces[r]
            count[g] = query_end[v] - query_begin[v]
            for q in range(query_begin[v], query_end[v]):
                queries_of[e] = order[q]
                e += 1
            query_ptr[g + 1] = e
            g += 1
    return query_ptr, queries_of, group_row, group_start, group_end, group_open, count
