"""Device planner, 5: what every candidate for the length of chunks is expected to cost.

The rules are the reference's (``policies/chunk_choice.py``). Each program prices one candidate
for one tile shape.
"""

from __future__ import annotations

from typing import NamedTuple

import triton.language as tl
from triton import jit

from deft_backend.planner.on_device.arrays import Candidates, Costs, Ranges
from deft_backend.planner.on_device.tiles import (
    Estimate,
    estimated_ns,
    overlap,
    parts_of,
    sizes_of,
    tiles_of,
    total,
)
from deft_backend.policies.chunk_choice import LEVEL, LEVELS, MOST_DOUBLINGS
from deft_backend.policies.measured_chunks import (
    ALONE,
    EXPOSED,
    HIDDEN,
    RAGGED,
    ROUNDING,
    TAIL,
    UNEVEN,
    Cut,
    ShapeCosts,
)
from deft_backend.shapes import MAX_MERGED


class Weights(NamedTuple):
    """Constants that ``policies/measured_chunks.py`` and its siblings explain."""

    alone: float = ALONE
    hidden: float = HIDDEN
    exposed: float = EXPOSED
    tail: float = TAIL
    ragged: float = RAGGED
    uneven: float = UNEVEN
    rounding: float = ROUNDING
    max_merged: int = MAX_MERGED
    levels: int = LEVELS
    level: float = LEVEL
    doublings: int = MOST_DOUBLINGS


@jit
def _slower(one, other):
    """About the larger of two times: (1 + ratio^8)^(1/8) times it."""
    larger = tl.maximum(one, other)
    share = tl.minimum(one, other) / larger
    share = share * share * share * share
    return larger * tl.sqrt(tl.sqrt(tl.sqrt(1.0 + share * share)))


@jit
def _cut_cost(cut, costs, WEIGHTS):
    items = cut.items.to(tl.float32)
    leaves_room = costs.is_large & (2 * cut.items <= costs.programs)
    token_ns = tl.where(leaves_room, costs.token_ns * WEIGHTS.alone, costs.token_ns)
    rounds = ((cut.items + costs.programs - 1) // costs.programs).to(tl.float32)
    per_item = cut.read / tl.maximum(cut.items, 1).to(tl.float32) * token_ns
    busy = rounds * (costs.item_ns + per_item)
    longest = tl.minimum(cut.chunk, cut.longest).to(tl.float32) * token_ns
    alone = costs.item_ns + longest
    transfer = cut.stored * costs.transfer_ns
    cost = _slower(tl.maximum(busy, alone), transfer)
    hidden = tl.where(leaves_room, tl.minimum(cost, WEIGHTS.hidden * costs.beside), 0.0)
    cost = tl.where(costs.is_large, tl.minimum(cost * costs.even, cost - hidden), cost)
    added = tl.where(costs.is_large, cut.results - cut.cut_queries, cut.results)
    cost += added.to(tl.float32) * costs.partial_ns
    fullest = tl.ceil(items / costs.sms - WEIGHTS.rounding) * costs.sms
    uneven = (items > costs.sms) & (cut.items <= costs.programs)
    small_cost = WEIGHTS.exposed * items * costs.item_ns / costs.programs.to(tl.float32)
    mean = tl.minimum(per_item, longest)
    small_cost += WEIGHTS.tail * longest + WEIGHTS.ragged * (longest - mean)
    small_cost += tl.where(uneven, WEIGHTS.uneven * transfer * (fullest / items - 1.0), 0.0)
    cost += tl.where(costs.is_large, 0.0, small_cost)
    # A leaf's item merges few results one after another; stage 2 merges many.
    most = cut.most.to(tl.float32)
    launch = tl.where(costs.is_reduced & (costs.is_large == 0), 0.0, costs.reduce_ns)
    in_stage_2 = launch + most * costs.reduce_ns / (16 * WEIGHTS.max_merged)
    in_stage_2 = tl.where(cut.most > 1, in_stage_2, 0.0)
    at_leaves = (cut.most - 1).to(tl.float32) * costs.reduce_ns / (2 * WEIGHTS.max_merged)
    is_reduced = (costs.is_large == 0) | (cut.most > WEIGHTS.max_merged)
    return cost + tl.where(is_reduced, in_stage_2, at_leaves)


@jit
def _makespan(slices, items, programs, WEIGHTS):
    """The largest of three bounds of the time of items on `programs` programs."""
    longest = tl.reduce(tl.where(items > 0, slices, 0.0), 0, tl.standard._elementwise_max)
    mean = total(slices * items.to(tl.float32)) / programs.to(tl.float32)
    bound = tl.maximum(mean, longest)
    level = longest
    for _ in range(WEIGHTS.levels):
        at_least = total(tl.where(slices >= level, items, 0))
        rounds = (at_least + programs - 1) // programs
        bound = tl.maximum(bound, rounds.to(tl.float32) * level)
        level *= WEIGHTS.level
    return bound


@jit
def _fills(tokens, tiles, parts, chunk, programs):
    """Whether the programs hold all chunks at once; ranges of one chunk share programs."""
    is_cut = tokens > chunk
    chunks = total(tl.where(is_cut, tiles * parts, 0)).to(tl.int64)
    shared = total(tl.where(is_cut, 0, tiles.to(tl.int64) * tokens.to(tl.int64)))
    return chunks * chunk + shared <= programs.to(tl.int64) * chunk


@jit(
    do_not_specialize=[
        "small_tile",
        "large_tile",
        "max_items",
        "max_entries",
        "small_programs",
        "large_programs",
        "block",
        "chunk_tokens",
    ]
)
def price_chunks(
    ranges: Ranges,
    candidates: Candidates,
    small_tile,
    large_tile,
    max_items,
    max_entries,
    small_programs,
    large_programs,
    sms,
    costs: Costs,
    reduce_ns,
    transfer_ns,
    block,
    chunk_tokens,
    estimate: Estimate,
    BATCH: tl.constexpr,
    CANDIDATES: tl.constexpr,
    CHUNKS: tl.constexpr,
    WEIGHTS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Write `Candidates.cost` and `Candidates.chunk`.

    `costs` are times of a program while all programs of its tile shape are busy. Each tile shape
    may take half of the items and entries that are left. A candidate that needs more costs
    infinity; the first candidate, one chunk, always fits.
    """
    overlap(OVERLAPPED)
    candidate = tl.program_id(0)
    shape = tl.program_id(1)
    which = tl.arange(0, 2 * BATCH)
    all_queries = tl.load(ranges.queries + which)
    all_large, all_tiles = tiles_of(all_queries, small_tile, large_tile)
    spare_entries = max_entries - total(all_queries)
    spare_items = max_items - total(all_tiles)

    mine = (all_queries > 0) & (all_large == (shape == 1))
    queries = tl.where(mine, all_queries, 0)
    tiles = tl.where(mine, all_tiles, 0)
    begin = tl.load(ranges.begin + which)
    all_tokens = tl.where(all_queries > 0, tl.load(ranges.end + which) - begin, 0)
    tokens = tl.where(mine, all_tokens, 0)
    longest = tl.reduce(tokens, 0, tl.standard._elementwise_max)
    sizes = sizes_of(tokens, shape == 1, estimate, CHUNKS)
    largest = longest
    unit = block
    if CHUNKS == "scheduled":
        largest = tl.reduce(tl.where(mine, sizes, 0), 0, tl.standard._elementwise_max)
        unit = 1
    num_chunks = tl.load(candidates.num_chunks + candidate)
    chunk = tl.maximum(unit, (largest + num_chunks * unit - 1) // (num_chunks * unit) * unit)
    if CHUNKS == "fixed":
        longer = chunk_tokens.to(tl.int64) << tl.minimum(candidate, WEIGHTS.doublings)
        longer = tl.where(candidate == CANDIDATES - 1, longest, longer)
        chunk = tl.minimum(longer, tl.maximum(longest, chunk_tokens)).to(tl.int32)
        chunk = tl.maximum(chunk, chunk_tokens)
    parts = parts_of(sizes, tokens, chunk, block, CHUNKS)
    items = total(tiles * parts)
    more_items = items - total(tiles)
    results = total(tl.where(parts > 1, queries * parts, 0))
    cut_queries = total(tl.where(parts > 1, queries, 0))
    more_entries = total(queries * (parts - 1))
    most = tl.reduce(tl.where(mine, parts, 1), 0, tl.standard._elementwise_max)
    programs = tl.where(shape == 1, large_programs, small_programs)
    fits = (2 * more_entries <= spare_entries) & (2 * more_items <= spare_items)
    fits |= chunk >= largest
    cost = candidate.to(tl.float32)
    if CHUNKS == "whole":
        fits = candidate == 0
    if CHUNKS == "filling":
        fits &= (candidate == 0) | _fills(tokens, tiles, parts, chunk, programs)
        cost = chunk.to(tl.float32)
    if CHUNKS == "scheduled":
        each = tokens.to(tl.float32) / parts.to(tl.float32)
        slices = estimated_ns(each, shape == 1, estimate)
        cost = _makespan(slices, tiles * parts, programs, WEIGHTS)
    if CHUNKS == "measured":
        read = total(tiles.to(tl.float32) * tokens.to(tl.float32))
        stored = total(tokens.to(tl.float32))
        cut = Cut(chunk, longest, items, read, stored, results, cut_queries, most)
        is_small = (all_queries > 0) & (all_large == 0)
        of_small = tl.where(is_small, all_tokens, 0).to(tl.float32)
        small_tokens = total(of_small)
        longest_small = tl.reduce(of_small, 0, tl.standard._elementwise_max)
        even = small_tokens / tl.maximum(total((of_small > 0).to(tl.float32)) * longest_small, 1.0)
        beside = small_tokens * transfer_ns + costs.small_item
        rounds = total(tl.where(is_small, all_tiles, 0)).to(tl.float32)
        beside /= tl.maximum(rounds / small_programs.to(tl.float32), 1.0)
        beside = tl.where(rounds > 0, beside, 0)
        shape_costs = ShapeCosts(
            is_large=shape == 1,
            programs=programs,
            sms=sms,
            item_ns=tl.where(shape == 1, costs.large_item, costs.small_item),
            token_ns=tl.where(shape == 1, costs.large_token, costs.small_token),
            partial_ns=costs.partial,
            reduce_ns=reduce_ns,
            transfer_ns=transfer_ns,
            beside=beside,
            even=tl.where(longest_small > 0, even, 1.0),
            is_reduced=total((is_small & (all_queries > 1)).to(tl.int32)) > 0,
        )
        cost = _cut_cost(cut, shape_costs, WEIGHTS)
    cost = tl.where(fits, cost, float("inf"))
    tl.store(candidates.cost + shape * CANDIDATES + candidate, cost)
    tl.store(candidates.chunk + shape * CANDIDATES + candidate, chunk)
