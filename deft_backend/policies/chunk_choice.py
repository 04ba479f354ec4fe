"""Choose the length of the chunks of each tile shape: the rule of `auto`.

The rule takes the ranges of one tile shape and prices candidates for the length of their chunks.
A candidate cuts the longest range into :data:`NUM_CHUNKS` equal chunks, rounded up to whole KV
blocks. It cuts every other range of the shape into chunks of at most that length. The cheapest
candidate wins. Its cost in nanoseconds is the sum of these terms:

- ``slower(max(busy, alone), stored * transfer_ns)``. The items take ``busy``: they run in rounds,
  one item on each program. One item takes at least ``alone``. The GPU's memory takes
  ``transfer_ns`` for one token of all KV heads.
- For large tiles that need at most half of their programs: minus the time of small tiles that run
  at the same time, up to the share :data:`HIDDEN`. Each such large tile also has half an SM to
  itself, and takes only :data:`ALONE` of its time per token.
- ``results * partial_ns`` for writing and reading partial results.
- For small tiles: the share :data:`EXPOSED` of the items' own cost, and the share :data:`UNEVEN` of
  the transfer if one round does not spread evenly over the SMs.
- The merges. Small tiles merge up to :data:`~deft_backend.shapes.kernel_limits.MAX_MERGED`
  results of large tiles, one after another. Stage 2 merges more than that, and the results of
  small tiles.

The rule drops a candidate with more than :data:`MOST_ROUNDS` rounds of items, and all shorter
chunks. The device planner computes the same on the GPU (``planner/on_device/price_chunks.py``) with
the constants of this module. The formula is written twice, because Numba and Triton cannot compile
each other's functions. ``tests/policies/test_chunk_choice.py`` compares the two, candidate by
candidate.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deft_backend.compile.host_jit import host_jit
from deft_backend.policies.range_choice import shape_of
from deft_backend.shapes.kernel_limits import MAX_MERGED

Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

NUM_CHUNKS = (*range(1, 9), *range(10, 33, 2), *range(40, 257, 8))
"""Candidates for the number of chunks of a tile shape's longest range."""

MOST_ROUNDS = 8
"""Most rounds of items over the programs; more rounds do not fill the GPU better."""

ALONE = 0.87
"""Time per token of a large tile with half an SM to itself, divided by its time next to another
one. Like :data:`HIDDEN`, it comes from sweeps of chunks over 40 trees on an H100
(docs/kernel-log.md)."""

HIDDEN = 0.6
"""Share of the small tiles' time in which large tiles run at no cost. It is less than 1: while the
memory is busy, the loads of a long item take about twice as long."""

EXPOSED = 0.35
"""Share of a small tile's ``item_ns`` that other items of the small tile do not hide.
Like :data:`UNEVEN`, it comes from 48 trees and five head shapes on an H100 (docs/kernel-log.md),
with leaves cut into different numbers of chunks."""

UNEVEN = 0.05
"""Weight of an uneven round of small tiles. Such a round loses this share of the transfer's time,
multiplied by the share by which the fullest SM holds more items than the average SM."""

ROUNDING = 1e-3
"""Subtracted before items per SM are rounded up, so that a whole number stays one in float32. Items
per SM are a multiple of 1 / SMs of the GPU, which is larger."""

_NUM_CHUNKS = np.array(NUM_CHUNKS, dtype=np.int64)


class Cut(NamedTuple):
    """Ranges of one tile shape, cut into chunks of one length.

    Attributes
    ----------
    chunk, longest : int
        Tokens of the longest chunk allowed, and of the longest range.
    items : int
        Work items: a query tile and a chunk each.
    read, stored : int
        Tokens that the items load, and tokens of the ranges.
    results : int
        Partial results: one for each query and chunk; ranges of one chunk leave none.
    most : int
        Chunks of the range with most chunks.
    """

    chunk: int
    longest: int
    items: int
    read: int
    stored: int
    results: int
    most: int


class ShapeCosts(NamedTuple):
    """The costs of one tile shape, in nanoseconds, and the programs that run its items.

    Attributes
    ----------
    small : bool
        Whether it is the small tile.
    programs : int
        Programs of the shape that run at once for each KV head.
    sms : float
        SMs of the GPU for each KV head.
    item_ns, token_ns, partial_ns, reduce_ns : float
        As in :class:`~deft_backend.costs.TileCosts`.
    transfer_ns : float
        Time in which the GPU's memory delivers one token of all KV heads.
    beside : float
        About the time that all items of the small tile take.
    """

    small: bool
    programs: int
    sms: float
    item_ns: float
    token_ns: float
    partial_ns: float
    reduce_ns: float
    transfer_ns: float
    beside: float


@host_jit
def _slower(one: float, other: float) -> float:
    """About the larger of two times: 9 % more if they are equal, 0.05 % more at a ratio of two.

    If the work is hardly faster than the memory, the sum does not reach the memory's speed.
    """
    larger = max(one, other)
    share = min(one, other) / larger
    found: float = larger * (1.0 + share**8) ** 0.125
    return found


@host_jit
def cut_cost(cut: Cut, costs: ShapeCosts) -> float:
    """Expected nanoseconds of a cut; the module's docstring states the rule."""
    rounds = (cut.items + costs.programs - 1) // costs.programs
    token = costs.token_ns
    leaves_room = not costs.small and 2 * cut.items <= costs.programs
    if leaves_room:
        token *= ALONE
    busy = rounds * (costs.item_ns + cut.read / cut.items * token)
    alone = costs.item_ns + min(cut.chunk, cut.longest) * token
    transfer = cut.stored * costs.transfer_ns
    expected = _slower(max(busy, alone), transfer)
    if leaves_room:
        expected -= min(expected, HIDDEN * costs.beside)
    expected += cut.results * costs.partial_ns
    if costs.small:
        expected += EXPOSED * cut.items * costs.item_ns / costs.programs
        if costs.sms < cut.items <= costs.programs:
            fullest = np.ceil(cut.items / costs.sms - ROUNDING) * costs.sms
            expected += UNEVEN * transfer * (fullest / cut.items - 1.0)
    if costs.small or cut.most > MAX_MERGED:
        if cut.most > 1:
            expected += costs.reduce_ns + cut.most * costs.reduce_ns / (16 * MAX_MERGED)
    else:
        expected += (cut.most - 1) * costs.reduce_ns / (2 * MAX_MERGED)
    return expected


@host_jit
def cut_into(queries: Int64Array, tokens: Int64Array, tiles: Int64Array, chunk: int) -> Cut:
    """Cut ranges of one tile shape.

    Parameters
    ----------
    queries, tokens, tiles : [R] int64
        Queries, tokens and query tiles of each range.
    chunk : int
        Most tokens of a chunk.
    """
    longest = np.int64(0)
    items = np.int64(0)
    read = np.int64(0)
    stored = np.int64(0)
    results = np.int64(0)
    most = np.int64(1)
    for r in range(len(queries)):
        parts = max(np.int64(1), (tokens[r] + chunk - 1) // chunk)
        longest = max(longest, tokens[r])
        items += tiles[r] * parts
        read += tiles[r] * tokens[r]
        stored += tokens[r]
        if parts > 1:
            results += queries[r] * parts
            most = max(most, parts)
    return Cut(chunk, longest, items, read, stored, results, most)


@host_jit
def chunk_of(longest: int, num_chunks: int, block: int) -> int:
    """Tokens of a chunk if the longest range is cut into `num_chunks` chunks of whole KV blocks."""
    found: int = max(block, (longest + num_chunks * block - 1) // (num_chunks * block) * block)
    return found


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
    """The cheapest chunk length of each tile shape, by the rule of this module.

    Parameters
    ----------
    queries, tokens : [R] int64
        Queries and tokens of each range.
    tile_queries, programs : [T] int64
        Queries that each tile shape holds, ascending, and programs of each that run at once.
    sms : float
        SMs of the GPU for each KV head.
    costs : [2 T + 2] float64
        :meth:`TileCosts.as_array() <deft_backend.costs.TileCosts.as_array>`.
    transfer_ns : float
        Nanoseconds in which the GPU's memory delivers one token of all KV heads.
    block : int
        Tokens of a KV block.

    Returns
    -------
    [T] int64
        Most tokens of a chunk, for each tile shape.
    """
    shapes = len(tile_queries)
    count = len(queries)
    shape = np.empty(count, dtype=np.int64)
    tiles = np.empty(count, dtype=np.int64)
    beside = 0.0
    for r in range(count):
        shape[r] = shape_of(queries[r], tile_queries)
        held = tile_queries[shape[r]]
        tiles[r] = (queries[r] + held - 1) // held
        if shape[r] == 0:
            beside = max(beside, costs[0]) + tokens[r] * transfer_ns

    found = np.empty(shapes, dtype=np.int64)
    for t in range(shapes):
        mine = np.flatnonzero(shape == t)
        my_queries, my_tokens, my_tiles = queries[mine], tokens[mine], tiles[mine]
        longest = np.int64(0)
        for r in range(len(mine)):
            longest = max(longest, my_tokens[r])
        found[t] = chunk_of(longest, 1, block)
        if len(mine) == 0:
            continue
        shape_costs = ShapeCosts(
            t == 0, programs[t], sms, costs[t], costs[shapes + t], costs[2 * shapes],
            costs[2 * shapes + 1], transfer_ns, beside,
        )  # fmt: skip
        best = np.inf
        last = np.int64(0)
        for num_chunks in _NUM_CHUNKS:
            chunk = chunk_of(longest, num_chunks, block)
            if chunk == last:
                continue
            last = chunk
            cut = cut_into(my_queries, my_tokens, my_tiles, chunk)
            if cut.items > MOST_ROUNDS * programs[t] and cut.most > 1:
                break
            cost = cut_cost(cut, shape_costs)
            if cost < best:
                best = cost
                found[t] = chunk
            if chunk == block:
                break
    return found
