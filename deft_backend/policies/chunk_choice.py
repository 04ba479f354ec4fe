"""How long chunks are: the second rule of every policy but `deft-flatten`.

A rule prices candidates for the chunks of one tile shape's ranges; the cheapest candidate wins, and
of equal ones the first. A candidate cuts the longest range into :data:`NUM_CHUNKS` chunks, rounded
up to whole KV blocks. It cuts every other range of the shape into chunks of at most that length. A
candidate that the plan cannot hold is out. The rules:

- ``whole``: no chunks (DeFT-Node).
- ``fixed``: chunks of a given length, or of 2, 4, 8, … times that length if the plan cannot hold
  so many (DeFT-Node-Chunk).
- ``filling``: as many chunks as leave no program idle. More would add partial results but no
  parallelism (Flash-Decoding; FastTree: long-context splitting).
- ``scheduled``: the least makespan (:func:`makespan`; FlashForge, section 5.1). Here chunks divide
  a range's time ``C_est``, not its tokens.
- ``measured``: the least time by measured costs (`auto`), as follows.

The measured cost of a candidate in nanoseconds is the sum of these terms:

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

The rule drops a candidate with more than :data:`MOST_ROUNDS` rounds of items. The device planner
computes the same on the GPU (``planner/on_device/price_chunks.py``) with the constants of this
module. Each formula is written twice, because Numba and Triton cannot compile each other's
functions. ``tests/policies/test_chunk_choice.py`` compares the two, candidate by candidate.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deft_backend.compile.host_jit import host_jit
from deft_backend.policies.edges import Int64Array
from deft_backend.policies.target import Target
from deft_backend.shapes.kernel_limits import MAX_MERGED

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


CHUNK_RULES = ("whole", "fixed", "filling", "scheduled", "measured")
"""The rules' names, as the device planner knows them."""

WHOLE, FIXED, FILLING, SCHEDULED, MEASURED = range(5)

MOST_DOUBLINGS = 20
"""Most doublings of the length of ``fixed`` chunks."""

LEVELS = 64
"""Costs for which :func:`makespan` counts items that take at least as long."""

LEVEL = 0.96
"""Ratio of neighbouring costs there."""


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
    is_large : bool
        Whether it is the large tile.
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

    is_large: bool
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
    leaves_room = costs.is_large and 2 * cut.items <= costs.programs
    if leaves_room:
        token *= ALONE
    busy = rounds * (costs.item_ns + cut.read / cut.items * token)
    alone = costs.item_ns + min(cut.chunk, cut.longest) * token
    transfer = cut.stored * costs.transfer_ns
    expected = _slower(max(busy, alone), transfer)
    if leaves_room:
        expected -= min(expected, HIDDEN * costs.beside)
    expected += cut.results * costs.partial_ns
    if not costs.is_large:
        expected += EXPOSED * cut.items * costs.item_ns / costs.programs
        if costs.sms < cut.items <= costs.programs:
            fullest = np.ceil(cut.items / costs.sms - ROUNDING) * costs.sms
            expected += UNEVEN * transfer * (fullest / cut.items - 1.0)
    if not costs.is_large or cut.most > MAX_MERGED:
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


class Machine(NamedTuple):
    """What the rules know of the GPU; ``T`` tile shapes of one segment, ascending.

    Attributes
    ----------
    tile_queries, programs : [T] int64
        Queries that each tile shape holds, and programs of each that run at once.
    sms : float
        SMs of the GPU for each KV head.
    costs : [2 T + 2] float64
        :meth:`TileCosts.as_array() <deft_backend.costs.TileCosts.as_array>`.
    transfer_ns : float
        Nanoseconds in which the GPU's memory delivers one token of all KV heads.
    block : int
        Tokens of a KV block.
    knots : [K] float64
        Profiled KV lengths of ``C_est``.
    estimates : [T, K] float64
        ``C_est`` of each tile shape at those lengths, in nanoseconds.
    """

    tile_queries: Int64Array
    programs: Int64Array
    sms: float
    costs: FloatArray
    transfer_ns: float
    block: int
    knots: FloatArray
    estimates: FloatArray


def machine_of(target: Target, batch: int) -> Machine:
    """The machine of `target` for a batch of so many queries."""
    tiles = np.array(target.single_range_tiles, dtype=np.int64)
    return Machine(
        tiles,
        np.array(target.programs_for(batch)[: len(tiles)], dtype=np.int64),
        target.num_sms / target.num_kv_heads,
        target.tile_costs(),
        target.transfer_ns,
        target.block_tokens,
        target.costs.tokens,
        target.estimates(),
    )


@host_jit
def shape_of(queries: int, tile_queries: Int64Array) -> int:
    """Tile shape of a group: the smallest tile that holds its queries, or the last."""
    shape = 0
    while shape + 1 < len(tile_queries) and tile_queries[shape] < queries:
        shape += 1
    return shape


@host_jit
def estimate(tokens: float, knots: FloatArray, at_knots: FloatArray) -> float:
    """``C_est`` of an item of so many tokens: linear between the knots and beyond them."""
    cell = 0
    while cell + 2 < len(knots) and knots[cell + 1] <= tokens:
        cell += 1
    rise = (at_knots[cell + 1] - at_knots[cell]) / (knots[cell + 1] - knots[cell])
    time: float = max(1.0, at_knots[cell] + (tokens - knots[cell]) * rise)
    return time


@host_jit
def makespan(slices: FloatArray, items: Int64Array, programs: int) -> float:
    """Least time of items on `programs` programs that no schedule can beat, as far as known.

    It is the largest of three bounds. Programs work at least their mean (FlashForge, equation 4).
    The longest item runs on one program. If ``k`` items take at least ``c`` each, some program
    works ``ceil(k / programs)`` of them; ``c`` takes the values ``longest * LEVEL ** j``.
    Longest-first scheduling stays close to these bounds; the plan's items are in that order.

    Parameters
    ----------
    slices : [R] float64
        Nanoseconds of each item of a range.
    items : [R] int64
        Items of the range.
    programs : int
    """
    mean = 0.0
    longest = 0.0
    for r in range(len(slices)):
        mean += slices[r] * items[r]
        longest = max(longest, slices[r])
    bound = max(mean / programs, longest)
    level = longest
    for _ in range(LEVELS):
        at_least = np.int64(0)
        for r in range(len(slices)):
            if slices[r] >= level:
                at_least += items[r]
        bound = max(bound, (at_least + programs - 1) // programs * level)
        level *= LEVEL
    return bound


class Limits(NamedTuple):
    """Groups and (group, query) pairs that chunks may add. Each tile shape may take half."""

    groups: int
    pairs: int


def limits_of(target: Target, groups: int, pairs: int) -> Limits:
    """What `target` leaves beside so many groups and pairs."""
    return Limits(target.max_groups - groups, target.max_group_queries - pairs)


@host_jit
def choose_chunks(
    rule: int,
    chunk_tokens: int,
    queries: Int64Array,
    tokens: Int64Array,
    machine: Machine,
    limits: Limits,
) -> Int64Array:
    """[T] the cheapest chunk length of each tile shape, by a rule of this module.

    Parameters
    ----------
    rule, chunk_tokens : int
        Place of the rule in :data:`CHUNK_RULES`, and the length of the rule ``fixed``.
    queries, tokens : [R] int64
        Queries and tokens of each range.

    Returns
    -------
    [T] int64
        Most tokens of a chunk, or nanoseconds for the rule ``scheduled``.
    """
    shapes = len(machine.tile_queries)
    count = len(queries)
    shape = np.empty(count, dtype=np.int64)
    tiles = np.empty(count, dtype=np.int64)
    beside = 0.0
    for r in range(count):
        shape[r] = shape_of(queries[r], machine.tile_queries)
        held = machine.tile_queries[shape[r]]
        tiles[r] = (queries[r] + held - 1) // held
        if shape[r] == 0:
            beside = max(beside, machine.costs[0]) + tokens[r] * machine.transfer_ns

    found = np.empty(shapes, dtype=np.int64)
    for t in range(shapes):
        mine = np.flatnonzero(shape == t)
        my_queries, my_tokens, my_tiles = queries[mine], tokens[mine], tiles[mine]
        unit = 1 if rule == SCHEDULED else machine.block
        sizes = _sizes(rule, my_tokens, machine.knots, machine.estimates[t])
        longest = np.int64(0)
        for r in range(len(mine)):
            longest = max(longest, sizes[r])
        found[t] = chunk_of(longest, 1, unit)
        if len(mine) == 0:
            continue
        costs = ShapeCosts(
            t > 0, machine.programs[t], machine.sms, machine.costs[t], machine.costs[shapes + t],
            machine.costs[2 * shapes], machine.costs[2 * shapes + 1], machine.transfer_ns, beside,
        )  # fmt: skip
        best = np.inf
        last = np.int64(0)
        for candidate in range(1 if rule == WHOLE else len(_NUM_CHUNKS)):
            chunk = chunk_of(longest, _NUM_CHUNKS[candidate], unit)
            if rule == FIXED:
                chunk = np.int64(chunk_tokens) << min(candidate, MOST_DOUBLINGS)
                chunk = min(chunk, max(longest, np.int64(chunk_tokens)))
            if chunk == last:
                continue
            last = chunk
            parts = parts_of(rule, sizes, my_tokens, chunk, machine.block)
            added = (parts - 1).sum()
            fits = 2 * added <= limits.groups
            fits = fits and 2 * ((parts - 1) * my_queries).sum() <= limits.pairs
            if not fits and chunk < longest:
                continue
            cost = float(candidate)
            if rule == SCHEDULED:
                slices = np.empty(len(mine))
                for r in range(len(mine)):
                    each = my_tokens[r] / parts[r]
                    slices[r] = estimate(each, machine.knots, machine.estimates[t])
                cost = makespan(slices, my_tiles * parts, machine.programs[t])
            elif rule == FILLING:
                cost = float(chunk)
                fills = _fills(my_tokens, my_tiles, parts, chunk, machine.programs[t])
                if not fills and candidate > 0:
                    continue
            elif rule == MEASURED:
                cut = cut_into(my_queries, my_tokens, my_tiles, chunk)
                if cut.items > MOST_ROUNDS * machine.programs[t] and cut.most > 1:
                    break
                cost = cut_cost(cut, costs)
            if cost < best:
                best = cost
                found[t] = chunk
            if chunk == unit or rule == FIXED:
                break
    return found


@host_jit
def _sizes(rule: int, tokens: Int64Array, knots: FloatArray, estimates: FloatArray) -> Int64Array:
    """What chunks divide: tokens, or nanoseconds for the rule ``scheduled``."""
    if rule != SCHEDULED:
        return tokens
    sizes = np.empty_like(tokens)
    for r in range(len(tokens)):
        sizes[r] = np.int64(estimate(float(tokens[r]), knots, estimates))
    return sizes


@host_jit
def parts_of(
    rule: int, sizes: Int64Array, tokens: Int64Array, chunk: int, block: int
) -> Int64Array:
    """[R] chunks of each range, at least one.

    ``scheduled`` cuts into at most one chunk for each KV block (FlashForge, equation 5).
    """
    parts = np.empty_like(sizes)
    for r in range(len(sizes)):
        parts[r] = max(np.int64(1), (sizes[r] + chunk - 1) // chunk)
        if rule == SCHEDULED:
            parts[r] = min(parts[r], max(np.int64(1), (tokens[r] + block - 1) // block))
    return parts


@host_jit
def _fills(
    tokens: Int64Array, tiles: Int64Array, parts: Int64Array, chunk: int, programs: int
) -> bool:
    """Whether the programs hold all chunks at once.

    Each chunk of a range that is cut takes a program. Ranges of one chunk share programs. So a
    context much longer than the rest (long tail) is cut even if the rest fills the GPU.
    """
    chunks = np.int64(0)
    shared = np.int64(0)
    for r in range(len(tokens)):
        if tokens[r] > chunk:
            chunks += tiles[r] * parts[r]
        else:
            shared += tiles[r] * tokens[r]
    return bool(chunks * chunk + shared <= programs * chunk)


@host_jit
def divided(
    rule: int, queries: Int64Array, tokens: Int64Array, machine: Machine, chunks: Int64Array
) -> Int64Array:
    """[R] chunks of each range, by the chunk lengths of :func:`choose_chunks`."""
    found = np.empty(len(queries), dtype=np.int64)
    one = np.empty(1, dtype=np.int64)
    for r in range(len(queries)):
        t = shape_of(queries[r], machine.tile_queries)
        one[0] = tokens[r]
        size = _sizes(rule, one, machine.knots, machine.estimates[t])
        found[r] = parts_of(rule, size, one, chunks[t], machine.block)[0]
    return found
