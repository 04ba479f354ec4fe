"""The reference planner: a forest's plan on the CPU, in plain NumPy.

The library's :meth:`TreeAttention.plan <deft_backend.TreeAttention.plan>`, `deft explain` and
servers on the CPU plan with it, and the tests of the device planner compare plans with its plans.
"""

import logging
from typing import NamedTuple

import numpy as np

from deft_backend.forest import Int32Array, PrefixForest
from deft_backend.planner.encoding import DIRECT, ITEM_ORDER, MERGES, OPEN_END, SPAN_SHIFT
from deft_backend.planner.plan import Plan, PlanCapacity
from deft_backend.policies import FlashDecoding, Grouping, Policy, Target
from deft_backend.policies.grouping import Int64Array, concatenated_ranges
from deft_backend.policies.policy import ABSOLUTE
from deft_backend.policies.target import DoesNotFit, Limits
from deft_backend.shapes import MAX_MERGED, MAX_TOKENS

logger = logging.getLogger(__name__)

NO_ITEM = -1


class PlanError(ValueError):
    """The plan's arrays cannot hold the forest, or a grouping leaves out a request."""


def plan_forest(
    forest: PrefixForest, policy: Policy, target: Target, capacity: PlanCapacity
) -> tuple[Plan, Grouping]:
    """Group a forest by `policy` and cut it into work items that fit `capacity`; plan and groups.

    If the arrays cannot hold the policy's items, each request reads its whole context by itself, in
    chunks by the policy's rule, as on the device. This always fits; the log gives the reason once.
    Chunks of `invariant` have no other length, and are refused instead.

    Raises PlanError if the batch is larger than `capacity.max_batch`, a request is too long for the
    kernels, the policy leaves one out, or the arrays cannot hold a plan of `invariant`; PolicyError
    if the policy cannot work with this target.
    """
    if forest.batch_size > capacity.max_batch:
        raise PlanError(
            f"the batch holds {forest.batch_size} requests; the plan was sized for "
            f"{capacity.max_batch}: raise max_batch"
        )
    _check_tiles(target)
    longest = int(forest.seq_lens.max(initial=0))
    if longest >= MAX_TOKENS:
        raise PlanError(
            f"a request holds {longest} tokens; the kernels read at most {MAX_TOKENS - 1}"
        )
    room = capacity.room(policy, forest.batch_size, target)
    bounded = target.within(room.limits)
    try:
        grouping = policy.group(forest, bounded)
        plan = plan_grouping(grouping, forest, target)
        reason = _overfull(plan, capacity)
    except DoesNotFit as error:
        reason = str(error)
    if reason is not None:
        if policy.rules is not None and policy.rules.chunks == ABSOLUTE:
            raise PlanError(f"{reason}: raise max_tokens or max_batch")
        _say_once(policy.name, reason)
        grouping = FlashDecoding(policy.rules).group(forest, bounded)
        plan = plan_grouping(grouping, forest, target)
        check_capacity(plan, capacity)
    return plan, grouping


_said: set[str] = set()


def _say_once(policy: str, reason: str) -> None:
    """Log only the first such batch of each policy, because the numbers differ in each batch."""
    if policy not in _said:
        _said.add(policy)
        logger.warning(
            "deft: policy %s cannot plan this batch (%s). In such batches each request reads its "
            "whole context; DEFT_POLICY names another policy",
            policy,
            reason,
        )


def check_capacity(plan: Plan, capacity: PlanCapacity) -> None:
    """Raise PlanError, which names the array that is too small, for a plan that does not fit."""
    reason = _overfull(plan, capacity)
    if reason is not None:
        raise PlanError(reason)


def _overfull(plan: Plan, capacity: PlanCapacity) -> str | None:
    names = ("work items", "(item, query) pairs", "KV ranges")
    taken = Limits(plan.num_items, len(plan.entry_query), len(plan.segment_request))
    for what, held, limit in zip(names, taken, capacity.limits, strict=True):
        if held > limit:
            return f"the plan has {held} {what}; its arrays hold {limit}"
    return None


def plan_grouping(grouping: Grouping, forest: PrefixForest, target: Target) -> Plan:
    """Cut groups into items and assign the slots of their partial results.

    A group with more queries than the largest tile is cut into even tiles. Each item runs in the
    smallest tile shape that holds it. Within a shape the longest items come first
    (longest-processing-time order, FlashForge section 5.1).

    A query with one item needs no slot: the item writes the output. Other queries get contiguous
    slots in the order of the context. An item of the last launch merges the others if they are at
    most MAX_MERGED; else stage 2 merges.

    Raises PlanError if some request of the batch belongs to no group.
    """
    _check_tiles(target)
    items = _list_items(grouping, target)
    held = items.stop - items.first
    item_query_ptr = _starts(held)
    members = concatenated_ranges(grouping.query_ptr[items.group] + items.first, held)
    entry_query = grouping.queries[members]
    parts = np.bincount(entry_query, minlength=forest.batch_size)  # items of each query
    if forest.batch_size and parts.min() == 0:
        raise PlanError(
            f"request {int(parts.argmin())} belongs to no group; a policy must cover every request"
        )

    begin = np.maximum(grouping.attend_begin[items.segment], items.first[items.owner])
    end = np.minimum(grouping.attend_end[items.segment], items.stop[items.owner])
    first = items.first[items.owner]
    span = (begin - first) | (end - first) << SPAN_SHIFT
    segment_end = np.where(grouping.open[items.segment], OPEN_END, grouping.end[items.segment])

    tile_ptr = _starts(np.bincount(items.place, minlength=len(ITEM_ORDER)))
    small = slice(*tile_ptr[ITEM_ORDER.index(0) :][:2])
    merging = _merging_items(small, item_query_ptr, entry_query, parts)
    # An item of a small tile has one segment, and items of several come last: numbers are equal.
    query = entry_query[item_query_ptr[small]]
    is_merging = merging[query] == np.arange(small.start, small.stop)
    span[small] = np.where(is_merging, parts[query] - 1, 0)

    reduced = np.flatnonzero((parts > 1) & (merging == NO_ITEM))
    entry_item = np.repeat(np.arange(len(held)), held)
    begins = grouping.start[items.segment[_starts(np.bincount(items.owner))[:-1]]][entry_item]
    arrays = (
        tile_ptr,
        _starts(np.bincount(items.owner, minlength=len(held))),
        item_query_ptr,
        grouping.request[items.segment] // target.query_blocks,
        grouping.start[items.segment],
        segment_end,
        span,
        entry_query,
        _slots(entry_query, entry_item, begins, parts, merging),
        reduced,
        _starts(parts[reduced]),
    )
    return Plan(*(array.astype(np.int32) for array in arrays))


def _check_tiles(target: Target) -> None:
    if target.largest_tile < 1:
        raise PlanError(
            f"{target.query_vectors} query vectors share a KV head; the largest tile holds "
            f"{max(target.tile_heights)}"
        )


class _Items(NamedTuple):
    """Work items in a plan's order, and the segments that their queries attend to."""

    group: Int64Array
    first: Int64Array
    stop: Int64Array  # [I]: the item's queries are ``first … stop - 1`` of its group
    place: Int64Array  # [I]: index of the tile shape in ITEM_ORDER
    segment: Int64Array  # [S]: segments of the grouping, item by item
    owner: Int64Array  # [S]: the item of each


def _list_items(grouping: Grouping, target: Target) -> _Items:
    """Cut groups into items.

    A group with more queries than the largest tile is cut into even tiles. A tile that attends to
    more segments than its shape holds is cut into several items.
    """
    *tile_queries, masked_queries = target.tile_queries
    queries = grouping.num_queries()
    # One range that every query attends to needs no mask; anything else does.
    several = grouping.several_ranges
    most = np.where(several, masked_queries, max(1, *tile_queries))
    count = -(-queries // most)  # tiles of each group
    group = np.repeat(np.arange(len(queries)), count)
    tile = concatenated_ranges(np.zeros_like(count), count)
    first = tile * queries[group] // count[group]
    stop = (tile + 1) * queries[group] // count[group]
    single = np.searchsorted(tile_queries, stop - first)
    if grouping.least_shape is not None:
        single = np.maximum(single, grouping.least_shape[group])
    shape = np.where(several[group], len(tile_queries), single)

    segments = np.diff(grouping.segment_ptr)[group]
    segment = concatenated_ranges(grouping.segment_ptr[group], segments)
    owner = np.repeat(np.arange(len(group)), segments)
    begin = np.maximum(grouping.attend_begin[segment], first[owner])
    attended = begin < np.minimum(grouping.attend_end[segment], stop[owner])
    segment, owner = segment[attended], owner[attended]
    # A tile's segments are neighbours: every so many of them begin an item.
    of_tile = np.bincount(owner, minlength=len(group))
    number = concatenated_ranges(np.zeros_like(of_tile), of_tile)
    begins = number % np.array((*target.tile_segments, 1))[shape[owner]] == 0
    at = owner[begins]  # the tile of each item
    item = np.cumsum(begins) - 1
    tokens = np.bincount(item, weights=(grouping.end - grouping.start)[segment], minlength=len(at))

    place = np.argsort(ITEM_ORDER)[shape[at]]
    order = np.lexsort((-tokens, place))  # equally long items keep the policy's order
    at = at[order]
    moved = np.empty_like(order)
    moved[order] = np.arange(len(order))
    by_item = np.argsort(moved[item], kind="stable")
    return _Items(
        group[at], first[at], stop[at], place[order], segment[by_item], moved[item][by_item]
    )


def _merging_items(
    small: slice, item_query_ptr: Int64Array, entry_query: Int32Array, parts: Int64Array
) -> Int64Array:
    """[B] the item that merges each query's partial results, or NO_ITEM.

    `small` are the items of the small tile, which the last launch of stage 1 runs. An item of one
    query merges if earlier launches write all others, and these are at most MAX_MERGED.
    """
    held = np.diff(item_query_ptr)[small]
    entries = slice(item_query_ptr[small.start], item_query_ptr[small.stop])
    in_last_launch = np.bincount(entry_query[entries], minlength=len(parts))
    merging = np.full(len(parts), NO_ITEM)
    alone = small.start + np.flatnonzero(held == 1)
    merging[entry_query[item_query_ptr[alone]]] = alone
    others = parts - 1
    merging[(in_last_launch != 1) | (others < 1) | (others > MAX_MERGED)] = NO_ITEM
    return merging


def _slots(
    entry_query: Int32Array,
    entry_item: Int64Array,
    begins: Int32Array,
    parts: Int64Array,
    merging: Int64Array,
) -> Int64Array:
    """[E] `entry_slot`: contiguous for each query, in the order of the context, stage 2's first.

    `begins` [E] are the first tokens of the entries' items.
    """
    merged = np.where(merging == NO_ITEM, 0, parts - 1)
    reduced = np.where((parts > 1) & (merging == NO_ITEM), parts, 0)
    first = np.where(merged > 0, reduced.sum() + _starts(merged)[:-1], _starts(reduced)[:-1])
    slot = np.where(parts[entry_query] == 1, DIRECT, MERGES - first[entry_query])
    written = (parts[entry_query] > 1) & (merging[entry_query] != entry_item)
    by_query = np.flatnonzero(written)[np.lexsort((begins[written], entry_query[written]))]
    results = merged + reduced
    slot[by_query] = concatenated_ranges(first, results)
    return slot


def _starts(count: Int64Array) -> Int64Array:
    """``0, count[0], count[0] + count[1], …``"""
    return np.append(0, np.cumsum(count))
