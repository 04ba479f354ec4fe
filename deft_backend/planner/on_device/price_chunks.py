"""Device planner, 5: what every candidate for the length of chunks is expected to cost.

The estimate is the host planner's (``policies/chunk_choice.py``). Each program prices one candidate
for one tile shape. The items of a tile shape run in rounds, with one item for each program in a
round.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton import jit
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deft_backend.planner.on_device.arrays import Candidates, Costs, Ranges
from deft_backend.planner.on_device.tiles import tiles_of, total


class Weights(NamedTuple):
    """Constants of the estimate, which ``policies/chunk_choice.py`` defines and explains."""

    alone: float
    hidden: float
    exposed: float
    uneven: float
    rounding: float
    max_merged: int


class Cut(NamedTuple):
    """Ranges of one tile shape, cut into chunks of one length, as in ``chunk_choice.py``."""

    chunk: Any
    longest: Any
    items: Any
    read: Any
    stored: Any
    results: Any
    most: Any


class ShapeCosts(NamedTuple):
    """The costs of one tile shape, as in ``chunk_choice.py``."""

    is_large: Any
    programs: Any
    sms: Any
    item_ns: Any
    token_ns: Any
    partial_ns: Any
    reduce_ns: Any
    transfer_ns: Any
    beside: Any


@jit
def _slower(one, other):
    """About the larger of two times: (1 + ratio^8)^(1/8) times it."""
    larger = tl.maximum(one, other)
    share = tl.minimum(one, other) / larger
    share = share * share * share * share
    return larger * tl.sqrt(tl.sqrt(tl.sqrt(1.0 + share * share)))


@jit
def _cut_cost(cut, costs, WEIGHTS: tl.constexpr):
    """Expected nanoseconds of a cut."""
    items = cut.items.to(tl.float32)
    leaves_room = costs.is_large & (2 * cut.items <= costs.programs)
    token_ns = tl.where(leaves_room, costs.token_ns * WEIGHTS.alone, costs.token_ns)
    rounds = ((cut.items + costs.programs - 1) // costs.programs).to(tl.float32)
    per_item = cut.read / tl.maximum(cut.items, 1).to(tl.float32) * token_ns
    busy = rounds * (costs.item_ns + per_item)
    alone = costs.item_ns + tl.minimum(cut.chunk, cut.longest).to(tl.float32) * token_ns
    transfer = cut.stored * costs.transfer_ns
    cost = _slower(tl.maximum(busy, alone), transfer)
    cost -= tl.where(leaves_room, tl.minimum(cost, WEIGHTS.hidden * costs.beside), 0.0)
    cost += cut.results.to(tl.float32) * costs.partial_ns
    fullest = tl.ceil(items / costs.sms - WEIGHTS.rounding) * costs.sms
    uneven = (items > costs.sms) & (cut.items <= costs.programs)
    small_cost = WEIGHTS.exposed * items * costs.item_ns / costs.programs.to(tl.float32)
    small_cost += tl.where(uneven, WEIGHTS.uneven * transfer * (fullest / items - 1.0), 0.0)
    cost += tl.where(costs.is_large, 0.0, small_cost)
    # A leaf's item merges few results one after another; stage 2 merges many.
    most = cut.most.to(tl.float32)
    in_stage_2 = costs.reduce_ns + most * costs.reduce_ns / (16 * WEIGHTS.max_merged)
    in_stage_2 = tl.where(cut.most > 1, in_stage_2, 0.0)
    at_leaves = (cut.most - 1).to(tl.float32) * costs.reduce_ns / (2 * WEIGHTS.max_merged)
    is_reduced = (costs.is_large == 0) | (cut.most > WEIGHTS.max_merged)
    return cost + tl.where(is_reduced, in_stage_2, at_leaves)


@jit(
    do_not_specialize=[
        "small_tile",
        "large_tile",
        "max_entries",
        "max_items",
        "small_programs",
        "large_programs",
        "block",
    ]
)
def price_chunks(
    ranges: Ranges,
    candidates: Candidates,
    small_tile,
    large_tile,
    max_entries,
    max_items,
    small_programs,
    large_programs,
    sms,
    costs: Costs,
    reduce_ns,
    transfer_ns,
    block,
    BATCH: tl.constexpr,
    CANDIDATES: tl.constexpr,
    WEIGHTS: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    """Write `Candidates.cost` and `Candidates.chunk`.

    `costs` are times of a program while all programs of its tile shape are busy. Each tile shape
    may take half of the items and entries that are left. A candidate that needs more costs
    infinity; the first candidate, one chunk, always fits.
    """
    if OVERLAPPED:
        gdc_launch_dependents()
        gdc_wait()
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
    num_chunks = tl.load(candidates.num_chunks + candidate)
    chunk = tl.maximum(block, (longest + num_chunks * block - 1) // (num_chunks * block) * block)
    parts = tl.maximum((tokens + chunk - 1) // chunk, 1)
    items = total(tiles * parts)
    more_items = items - total(tiles)
    results = total(tl.where(parts > 1, queries * parts, 0))
    more_entries = total(queries * (parts - 1))
    most = tl.reduce(tl.where(mine, parts, 1), 0, tl.standard._elementwise_max)
    read = total(tiles.to(tl.float32) * tokens.to(tl.float32))
    stored = total(tokens.to(tl.float32))
    cut = Cut(chunk, longest, items, read, stored, results, most)
    is_small = (all_queries > 0) & (all_large == 0)
    small_tokens = total(tl.where(is_small, all_tokens, 0).to(tl.float32))
    beside = small_tokens * transfer_ns + costs.small_item
    beside = tl.where(total(is_small.to(tl.int32)) > 0, beside, 0)
    shape_costs = ShapeCosts(
        is_large=shape == 1,
        programs=tl.where(shape == 1, large_programs, small_programs),
        sms=sms,
        item_ns=tl.where(shape == 1, costs.large_item, costs.small_item),
        token_ns=tl.where(shape == 1, costs.large_token, costs.small_token),
        partial_ns=costs.partial,
        reduce_ns=reduce_ns,
        transfer_ns=transfer_ns,
        beside=beside,
    )
    cost = _cut_cost(cut, shape_costs, WEIGHTS)
    fits = (2 * more_entries <= spare_entries) & (2 * more_items <= spare_items)
    useful = (items <= 8 * shape_costs.programs) | (most == 1)
    cost = tl.where((candidate == 0) | (fits & useful), cost, float("inf"))
    tl.store(candidates.cost + shape * CANDIDATES + candidate, cost)
    tl.store(candidates.chunk + shape * CANDIDATES + candidate, chunk)
