"""How long chunks are: the second rule of every policy.

A rule prices candidates for the chunks of one tile shape's ranges; the cheapest candidate wins, and
of equal ones the first. A candidate cuts the longest range into :data:`NUM_CHUNKS` chunks, rounded
up to whole KV blocks. It cuts every other range of the shape into chunks of at most that length. A
candidate that the plan cannot hold is out. The rules:

- ``whole``: no chunks (DeFT-Node).
- ``fixed``: chunks of a given length, or of 2, 4, 8, … times that length if the plan cannot hold
  so many (DeFT-Node-Chunk; DeFT-Flatten has its own).
- ``filling``: as many chunks as leave no program idle. More would add partial results but no
  parallelism (Flash-Decoding; FastTree: long-context splitting).
- ``scheduled``: the least makespan (``scheduled_chunks.py``). Here chunks divide a range's time
  ``C_est``, not its tokens.
- ``measured``: the least time by measured costs (``measured_chunks.py``).

The device planner computes the same on the GPU (``planner/on_device/price_chunks.py``) with the
constants of these modules. Each formula is written twice, because Numba and Triton cannot compile
each other's functions. ``tests/policies/test_chunk_choice.py`` compares the two, candidate by
candidate.
"""

from typing import NamedTuple

import numpy as np

from deft_backend.compile.host_jit import host_jit
from deft_backend.costs.cost_model import FloatArray
from deft_backend.policies.edges import Int64Array
from deft_backend.policies.measured_chunks import ShapeCosts, cut_cost, cut_into
from deft_backend.policies.scheduled_chunks import estimate, makespan
from deft_backend.policies.target import Target

NUM_CHUNKS = (*range(1, 9), *range(10, 33, 2), *range(40, 257, 8))
"""Candidates for the number of chunks of a tile shape's longest range."""

_NUM_CHUNKS = np.array(NUM_CHUNKS, dtype=np.int64)

CHUNK_RULES = ("whole", "fixed", "filling", "scheduled", "measured")
"""The rules' names, as the device planner knows them."""

WHOLE, FIXED, FILLING, SCHEDULED, MEASURED = range(5)

MOST_DOUBLINGS = 20  # most doublings of the length of ``fixed`` chunks


@host_jit
def chunk_of(longest: int, num_chunks: int, block: int) -> int:
    """Tokens of a chunk if the longest range is cut into `num_chunks` chunks of whole KV blocks."""
    found: int = max(block, (longest + num_chunks * block - 1) // (num_chunks * block) * block)
    return found


class Machine(NamedTuple):
    """What the rules know of the GPU; ``T`` tile shapes of one segment, ascending."""

    tile_queries: Int64Array  # [T]: queries that each tile shape holds
    programs: Int64Array  # [T]: programs of each shape that run at once for each KV head
    sms: float  # SMs of the GPU for each KV head
    costs: FloatArray
    """[2 T + 2]: :meth:`TileCosts.as_array() <deft_backend.costs.TileCosts.as_array>`."""
    transfer_ns: float  # nanoseconds in which the GPU's memory delivers one token of all KV heads
    block: int  # tokens of a KV block
    knots: FloatArray  # [K]: profiled KV lengths of ``C_est``
    estimates: FloatArray  # [T, K]: ``C_est`` of each tile shape at those lengths, in nanoseconds


def machine_of(target: Target, batch: int) -> Machine:
    """The machine of `target` for a batch of so many queries."""
    tiles = np.array(target.single_range_tiles, dtype=np.int64)
    programs = np.array(target.programs_for(batch)[: len(tiles)], dtype=np.int64)
    return Machine(
        tiles, programs, target.num_sms / target.num_kv_heads, target.tile_costs(),
        target.transfer_ns, target.block_tokens, target.costs.tokens, target.estimates(),
    )  # fmt: skip


@host_jit
def shape_of(queries: int, tile_queries: Int64Array) -> int:
    """Tile shape of a group: the smallest tile that holds its queries, or the last."""
    shape = 0
    while shape + 1 < len(tile_queries) and tile_queries[shape] < queries:
        shape += 1
    return shape


@host_jit
def tiles_of(queries: Int64Array, tile_queries: Int64Array) -> Int64Array:
    """[R] query tiles of each range."""
    found = np.empty(len(queries), dtype=np.int64)
    for r in range(len(queries)):
        held = tile_queries[shape_of(queries[r], tile_queries)]
        found[r] = (queries[r] + held - 1) // held
    return found


class Limits(NamedTuple):
    """Items and (item, query) pairs that chunks may add. Each tile shape may take half."""

    items: int
    entries: int


def limits_of(target: Target, items: int, entries: int) -> Limits:
    """The room that a target has left, if so many items and pairs exist."""
    return Limits(target.max_items - items, target.max_entries - entries)


@host_jit
def choose_chunks(
    rule: int, chunk_tokens: int, queries: Int64Array, tokens: Int64Array, machine: Machine,
    limits: Limits,
) -> Int64Array:  # fmt: skip
    """[T] the cheapest chunk length of each tile shape, by a rule of :data:`CHUNK_RULES`.

    It is the most tokens of a chunk, or nanoseconds for the rule ``scheduled``. `chunk_tokens` is
    the length of the rule ``fixed``; `queries` and `tokens` [R] are those of each range.
    """
    shapes = len(machine.tile_queries)
    count = len(queries)
    shape = np.empty(count, dtype=np.int64)
    tiles = tiles_of(queries, machine.tile_queries)
    beside = 0.0
    small = np.int64(0)
    ranges = np.int64(0)
    total = np.int64(0)
    longest_small = np.int64(0)
    for r in range(count):
        shape[r] = shape_of(queries[r], machine.tile_queries)
        if shape[r] == 0:
            small += tiles[r]
            beside = max(beside, machine.costs[0]) + tokens[r] * machine.transfer_ns
            ranges += tokens[r] > 0
            total += tokens[r]
            longest_small = max(longest_small, tokens[r])
    beside /= max(1.0, small / machine.programs[0])
    even = total / (ranges * longest_small) if longest_small > 0 else 1.0

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
            even,
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
            fits = 2 * ((parts - 1) * my_tiles).sum() <= limits.items
            fits = fits and 2 * ((parts - 1) * my_queries).sum() <= limits.entries
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
                fits = fills(my_tokens, my_tiles, parts, chunk, machine.programs[t])
                if not fits and candidate > 0:
                    continue
            elif rule == MEASURED:
                cost = cut_cost(cut_into(my_queries, my_tokens, my_tiles, chunk), costs)
            if cost < best:
                best = cost
                found[t] = chunk
            if chunk == unit or rule == FIXED:
                break
    return found


@host_jit
def fills(
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
