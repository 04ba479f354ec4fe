"""How long chunks are: the second rule of every policy.

A rule prices candidates for the chunks of one tile shape's ranges; the cheapest wins, of equal ones
the first. A candidate cuts the longest range into one of :data:`NUM_CHUNKS` chunks of whole KV
blocks, and every other range into chunks of at most that length. A candidate that the plan cannot
hold is out. The rules:

- ``whole``: no chunks (DeFT-Node).
- ``fixed``: chunks of a given length, or of 2, 4, 8, … times that length if the plan cannot hold so
  many (DeFT-Node-Chunk; DeFT-Flatten has its own).
- ``filling``: as many chunks as leave no program idle. More would add partial results but no
  parallelism (Flash-Decoding; FastTree: long-context splitting).
- ``scheduled``: the least makespan (FlashForge, section 5). Here chunks divide a range's time
  ``C_est``, not its tokens.
- ``measured``: the least time by measured costs (``measured_chunks.py``).

The device planner computes the same (``planner/on_device/price_chunks.py``); a test compares the
two, candidate by candidate.
"""

from typing import NamedTuple

import numpy as np

from deft_backend.costs.cost_model import FloatArray
from deft_backend.policies.grouping import Int64Array
from deft_backend.policies.measured_chunks import ShapeCosts, cut_cost, cut_into
from deft_backend.policies.target import Limits, Target

NUM_CHUNKS = (*range(1, 9), *range(10, 33, 2), *range(40, 257, 8))
"""Candidates for the number of chunks of a tile shape's longest range."""

CHUNK_RULES = ("whole", "fixed", "filling", "scheduled", "measured")
"""The rules' names, as the device planner knows them."""

LEVELS = 64  # costs for which :func:`makespan` counts items that take at least as long

LEVEL = 0.96  # ratio of neighbouring costs there

MOST_DOUBLINGS = 20  # most doublings of the length of ``fixed`` chunks


class Machine:
    """What the rules know of the GPU of `target`, for a batch of so many queries; ``T`` tile shapes
    of one segment, ascending.
    """

    def __init__(self, target: Target, batch: int) -> None:
        tiles = target.single_range_tiles
        #: [T]: queries that each tile shape holds
        self.tile_queries = np.array(tiles, dtype=np.int64)
        #: [T]: programs of each shape that run at once for each KV head
        self.programs = np.array(target.programs_for(batch)[: len(tiles)], dtype=np.int64)
        self.sms = target.num_sms / target.num_kv_heads  # for each KV head
        self.costs = target.tile_costs()  # [2 T + 2]
        self.transfer_ns = target.transfer_ns
        self.block = target.block_tokens
        self.knots = target.costs.tokens  # [K]: profiled KV lengths of ``C_est``
        self.estimates = target.estimates()  # [T, K]


def shapes_of(queries: Int64Array, tile_queries: Int64Array) -> Int64Array:
    """[R] tile shape of each range: the smallest tile that holds its queries, or the last."""
    shape: Int64Array = np.searchsorted(tile_queries[:-1], queries)
    return shape


def tiles_of(queries: Int64Array, tile_queries: Int64Array) -> Int64Array:
    """[R] query tiles of each range."""
    tiles: Int64Array = -(-queries // tile_queries[shapes_of(queries, tile_queries)])
    return tiles


def chunk_of(longest: int, num_chunks: Int64Array | int, block: int) -> Int64Array:
    """Tokens of a chunk if the longest range is cut into `num_chunks` chunks of whole KV blocks."""
    chunk: Int64Array = np.maximum(block, -(-longest // (np.asarray(num_chunks) * block)) * block)
    return chunk


class Ranges(NamedTuple):
    """The ranges of one tile shape."""

    queries: Int64Array
    tokens: Int64Array
    tiles: Int64Array  # [R]


def choose_chunks(
    rule: str,
    chunk_tokens: int,
    queries: Int64Array,
    tokens: Int64Array,
    machine: Machine,
    limits: Limits,
) -> Int64Array:
    """[R] the number of chunks of each range, by the cheapest chunk length of its tile shape.

    `queries` and `tokens` [R] are those of each range, `chunk_tokens` is the length of the rule
    ``fixed``. `limits` are what chunks may add; each tile shape may take half.
    """
    shape = shapes_of(queries, machine.tile_queries)
    tiles = tiles_of(queries, machine.tile_queries)
    beside = small_tiles(queries[shape == 0], tokens[shape == 0], machine)
    found = np.ones_like(tokens)
    for t in range(len(machine.tile_queries)):
        mine = shape == t
        if rule == "whole" or not mine.any():
            continue
        ranges = Ranges(queries[mine], tokens[mine], tiles[mine])
        sizes = ranges.tokens  # what chunks divide: tokens, or nanoseconds
        if rule == "scheduled":
            sizes = estimate(sizes, machine.knots, machine.estimates[t]).astype(np.int64)
        costs = shape_costs(machine, t, beside)
        longest = int(sizes.max(initial=0))
        unit = 1 if rule == "scheduled" else machine.block
        if rule == "fixed":
            doubled = chunk_tokens << np.minimum(np.arange(len(NUM_CHUNKS)), MOST_DOUBLINGS)
            chunks = np.minimum(doubled, max(longest, chunk_tokens))
        else:
            chunks = chunk_of(longest, np.array(NUM_CHUNKS), unit)
        parts = parts_of(rule, sizes, tokens[mine], chunks[:, None], machine.block)
        fits = 2 * ((parts - 1) @ ranges.tiles) <= limits.items
        fits &= 2 * ((parts - 1) @ ranges.queries) <= limits.entries
        fits |= chunks >= longest
        price = np.where(fits, _prices(rule, chunks, parts, ranges, costs, machine), np.inf)
        if np.isfinite(price).any():
            found[mine] = parts[price.argmin()]
    return found


def shape_costs(machine: Machine, shape: int, beside: tuple[float, float, bool]) -> ShapeCosts:
    """The costs of a tile shape; `beside` comes from :func:`small_tiles`."""
    costs, shapes = machine.costs.tolist(), len(machine.tile_queries)
    partial_ns, reduce_ns = costs[2 * shapes :]
    times = (costs[shape], costs[shapes + shape], partial_ns, reduce_ns, machine.transfer_ns)
    return ShapeCosts(shape > 0, int(machine.programs[shape]), machine.sms, *times, *beside)


def small_tiles(
    queries: Int64Array, tokens: Int64Array, machine: Machine
) -> tuple[float, float, bool]:
    """The last fields of :class:`ShapeCosts`, from the ranges of the small tile."""
    if not tokens.any():
        even = 1.0
    else:
        even = float(tokens.sum() / (np.count_nonzero(tokens) * tokens.max()))
    # Added one after the other: NumPy's sum adds in another order, and rounds differently.
    transfers = tokens * machine.transfer_ns
    beside = sum(transfers.tolist(), machine.costs[0]) if len(tokens) else 0.0
    tiles = tiles_of(queries, machine.tile_queries)
    rounds = max(1.0, tiles.sum() / machine.programs[0])
    return beside / rounds, even, bool((queries > 1).any())


def _prices(
    rule: str,
    chunks: Int64Array,
    parts: Int64Array,
    ranges: Ranges,
    costs: ShapeCosts,
    machine: Machine,
) -> FloatArray:
    """[C] price of each candidate; `parts` [C, R] are the chunks of each range."""
    if rule == "measured":
        return cut_cost(cut_into(ranges.queries, ranges.tokens, ranges.tiles, chunks), costs)
    if rule == "scheduled":
        estimates = machine.estimates[int(costs.is_large)]
        each = estimate(ranges.tokens / parts, machine.knots, estimates)
        items = ranges.tiles * parts
        pairs = zip(each, items, strict=True)
        return np.array([makespan(slices, count, costs.programs) for slices, count in pairs])
    if rule == "filling":
        # Each chunk of a range that is cut takes a program; ranges of one chunk share programs. So
        # a context much longer than the rest (long tail) is cut even if the rest fills the GPU.
        is_cut = ranges.tokens > chunks[:, None]
        taken = (is_cut * parts) @ ranges.tiles * chunks
        fills = taken + ~is_cut @ (ranges.tiles * ranges.tokens) <= costs.programs * chunks
        fills[0] = True
        return np.where(fills, chunks, np.inf)
    return np.arange(len(chunks), dtype=np.float64)


def parts_of(
    rule: str, sizes: Int64Array, tokens: Int64Array, chunk: Int64Array, block: int
) -> Int64Array:
    """Chunks of each range, at least one; [R], or [C, R] for `chunk` [C, 1].

    ``scheduled`` cuts into at most one chunk for each KV block (FlashForge, equation 5).
    """
    parts: Int64Array = np.maximum(1, -(-sizes // chunk))
    if rule == "scheduled":
        parts = np.minimum(parts, np.maximum(1, -(-tokens // block)))
    return parts


def estimate(
    tokens: Int64Array | FloatArray, knots: FloatArray, at_knots: FloatArray
) -> FloatArray:
    """``C_est`` of items of so many tokens: linear between the knots and beyond them."""
    cell = np.clip(np.searchsorted(knots, tokens, side="right") - 1, 0, len(knots) - 2)
    rise = (at_knots[cell + 1] - at_knots[cell]) / (knots[cell + 1] - knots[cell])
    time: FloatArray = np.maximum(1.0, at_knots[cell] + (tokens - knots[cell]) * rise)
    return time


def makespan(slices: FloatArray, items: Int64Array, programs: int) -> float:
    """The largest of three lower bounds of the time of items on `programs` programs.

    Programs work at least their mean (FlashForge, equation 4). The longest item runs on one
    program. If ``k`` items take at least ``c`` each, some program works ``ceil(k / programs)`` of
    them; ``c`` takes the values ``longest * LEVEL ** j``. Longest-first scheduling stays close to
    these bounds.

    `slices` [R] are nanoseconds of each item of a range, `items` [R] the range's items.
    """
    ascending = np.argsort(slices)
    longest = slices[ascending[-1]]
    levels = longest * LEVEL ** np.arange(LEVELS)
    below = np.searchsorted(slices[ascending], levels)  # ranges that take less
    at_least = items.sum() - np.append(0, np.cumsum(items[ascending]))[below]
    counted = (-(-at_least // programs) * levels).max()
    return float(max(slices @ items / programs, longest, counted))
