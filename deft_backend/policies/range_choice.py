"""Which KV ranges get items of their own, and how long their chunks are: `auto`, compiled."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from deft_backend.compile.host_jit import host_jit
from deft_backend.kernel_limits import MAX_MERGED

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float64]

ROOT = -1

ALONE = 0.87
"""Time a token takes an item of a large tile that has half an SM to itself, over its time beside
another: as the next one, from sweeps of chunks over 40 trees on an H100 (docs/kernel-log.md)."""

EXPOSED = 0.35
"""How much of an item's own time, beside its tokens', other items of the smallest shape do not
hide: as the next one, from leaves cut in other pieces on an H100, 48 trees of five head shapes
(docs/kernel-log.md)."""

UNEVEN = 0.05
"""How much longer all items of one round take for each SM's share of time in which it holds fewer
of them than the fullest."""

HIDDEN = 0.6
"""How much of the time that items of the smallest shape take those of a large one may take beside
them for nothing. Less than all of it: where the memory is busy, the loads of a long item, each
waiting for the ones before, take about twice as long as alone."""


@host_jit
def _shape_of(queries: int, tile_queries: Int64Array) -> int:
    """Tile shape that a group of `queries` queries runs in."""
    shape = 0
    while shape + 1 < len(tile_queries) and tile_queries[shape] < queries:
        shape += 1
    return shape


@host_jit
def _slower(one: float, other: float) -> float:
    """About the larger of two times; 9 % more where they are equal, 0.05 % where one is twice."""
    larger = max(one, other)
    share = min(one, other) / larger
    found: float = larger * (1.0 + share**8) ** 0.125
    return found


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
        shape = _shape_of(queries, tile_queries)
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
        shape = _shape_of(queries, tile_queries)
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
def choose_chunks(
    queries: Int64Array,
    tokens: Int64Array,
    tile_queries: Int64Array,
    programs: Int64Array,
    sms: float,
    costs: FloatArray,
    transfer_ns: float,
    block: int,
) -> Int64Array:
    """[T] longest chunk of each tile shape, in tokens.

    Items of a shape run in rounds of as many as there are programs; short chunks even them out and
    fill the programs, but each chunk has its overhead and its partial results. `sms` are those of
    the GPU for each KV head, over which the items of one round should spread evenly. `transfer_ns`
    is the time in which the GPU's memory delivers one token of all KV heads: no chunking beats it,
    and what is hardly faster than the memory does not reach it (see `_slower`).

    Where items of a large shape take no more than half of its programs, each runs alone on an SM:
    faster, and beside items of the smallest shape, which else begin when the large ones end.
    """
    shapes = len(tile_queries)
    count = len(queries)
    partial = costs[2 * shapes]
    reduce = costs[2 * shapes + 1]
    shape = np.empty(count, dtype=np.int64)
    tiles = np.empty(count, dtype=np.int64)
    longest = np.zeros(shapes, dtype=np.int64)
    for r in range(count):
        shape[r] = _shape_of(queries[r], tile_queries)
        largest = tile_queries[shape[r]]
        tiles[r] = (queries[r] + largest - 1) // largest
        longest[shape[r]] = max(longest[shape[r]], tokens[r])
    # About the time that items of the smallest shape take.
    beside = 0.0
    for r in range(count):
        if shape[r] == 0:
            beside = max(beside, costs[0]) + tokens[r] * transfer_ns

    found = np.empty(shapes, dtype=np.int64)
    for t in range(shapes):
        found[t] = max(block, (longest[t] + block - 1) // block * block)
        best = np.inf
        last = np.int64(0)
        pieces = np.int64(0)
        while pieces < 256:
            pieces += 1 if pieces < 8 else (2 if pieces < 32 else 8)
            chunk = max(block, (longest[t] + pieces * block - 1) // (pieces * block) * block)
            if chunk == last:
                if chunk == block:
                    break
                continue
            last = chunk
            items = np.int64(0)
            read = np.int64(0)
            stored = np.int64(0)
            results = np.int64(0)
            most = np.int64(1)
            for r in range(count):
                if shape[r] != t:
                    continue
                parts = max(np.int64(1), (tokens[r] + chunk - 1) // chunk)
                items += tiles[r] * parts
                read += tiles[r] * tokens[r]
                stored += tokens[r]
                if parts > 1:
                    results += queries[r] * parts
                    most = max(most, parts)
            if items == 0 or (items > 8 * programs[t] and most > 1):
                break
            rounds = (items + programs[t] - 1) // programs[t]
            token = costs[shapes + t]
            leaves_room = t > 0 and 2 * items <= programs[t]
            if leaves_room:
                token *= ALONE
            busy = rounds * (costs[t] + read / items * token)
            alone = costs[t] + min(chunk, longest[t]) * token
            expected = _slower(max(busy, alone), stored * transfer_ns)
            if leaves_room:
                expected -= min(expected, HIDDEN * beside)
            expected += results * partial
            if t == 0:
                expected += EXPOSED * items * costs[t] / programs[t]
                if sms < items <= programs[t]:
                    fullest = np.ceil(items / sms) * sms
                    expected += UNEVEN * stored * transfer_ns * (fullest / items - 1.0)
            # Few results are merged one after another where the leaf is read, many in stage 2,
            # which takes longer the more it has of one query.
            if t == 0 or most > MAX_MERGED:
                if most > 1:
                    expected += reduce + most * reduce / (16 * MAX_MERGED)
            else:
                expected += (most - 1) * reduce / (2 * MAX_MERGED)
            if expected < best:
                best = expected
                found[t] = chunk
    return found


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
        chunk = chunk_tokens[_shape_of(queries, tile_queries)]
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
