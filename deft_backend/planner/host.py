"""Host planner: forest and policy to Plan. Runs when the batch's composition changes."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from deft_backend.forest import Int32Array, PrefixForest
from deft_backend.planner.plan import DIRECT, OPEN_END, Plan, PlanCapacity
from deft_backend.policies import Grouping, Policy, PolicyError, Target, get_policy

logger = logging.getLogger(__name__)


class PlanError(ValueError):
    """A forest that the plan's arrays cannot hold, or a grouping that is not an attention."""


def plan_forest(
    forest: PrefixForest, policy: Policy, target: Target, capacity: PlanCapacity
) -> tuple[Plan, Grouping]:
    """Group a forest by `policy` and cut it into work items that fit `capacity`.

    Where the policy wants more groups than the arrays hold (node by node on a degenerate tree),
    the baseline `flash-decoding` is planned instead, which always fits, and the log says so.

    Raises
    ------
    PlanError
        If the batch is larger than `capacity.max_batch`.
    """
    if forest.batch_size > capacity.max_batch:
        raise PlanError(
            f"the batch holds {forest.batch_size} requests; the plan was sized for "
            f"{capacity.max_batch}: raise max_batch"
        )
    # Items can outnumber groups where a group has more queries than a tile; leave room for them.
    bounded = replace(
        target,
        max_groups=min(target.max_groups, capacity.max_items // 2),
        max_group_queries=min(target.max_group_queries, capacity.max_entries),
    )
    try:
        grouping = policy.group(forest, bounded)
        plan = plan_grouping(grouping, forest, target)
        _check_capacity(plan, capacity)
    except (PolicyError, PlanError) as error:
        _say_once(f"policy {policy.name}: {error}; planning flash-decoding for such batches")
        # One query a group, one item a group: no room needed for tiles.
        bounded = replace(bounded, max_groups=min(target.max_groups, capacity.max_items))
        grouping = get_policy("flash-decoding").group(forest, bounded)
        plan = plan_grouping(grouping, forest, target)
        _check_capacity(plan, capacity)
    return plan, grouping


def plan_grouping(grouping: Grouping, forest: PrefixForest, target: Target) -> Plan:
    """Cut groups into (KV range, query tile) items and lay out their partial results.

    A group with more queries than the largest tile is cut into even tiles; each item runs in the
    smallest tile shape that holds it, longest first within a shape (longest-processing-time
    order, FlashForge section 5.1). A query that takes part in one item needs no reduction: that
    item writes the output. The others get contiguous partial slots, in item order.

    Raises
    ------
    PlanError
        If some request of the batch belongs to no group.
    """
    num_queries = grouping.num_queries()
    largest = target.tile_queries[-1]
    if largest < 1:
        raise PlanError(
            f"{target.gqa_group} query heads share a KV head; the largest tile has "
            f"{target.tile_rows[-1]} rows"
        )
    tiles = -(-num_queries // largest)

    group = np.repeat(np.arange(grouping.num_groups, dtype=np.int64), tiles)
    nth = _positions(tiles)
    first = nth * num_queries[group] // tiles[group]
    stop = (nth + 1) * num_queries[group] // tiles[group]
    shape = np.searchsorted(np.asarray(target.tile_rows), (stop - first) * target.gqa_group)
    tokens = grouping.num_tokens()[group]
    launch = np.lexsort((-tokens, shape))
    group, first, stop, shape = group[launch], first[launch], stop[launch], shape[launch]

    count = stop - first
    entry = np.repeat(grouping.query_ptr[group] + first, count) + _positions(count)
    entry_query = grouping.queries[entry]
    entry_slot, reduce_query, reduce_ptr = _partial_slots(entry_query, forest)

    segments = np.diff(grouping.segment_ptr)[group]
    segment = np.repeat(grouping.segment_ptr[group], segments) + _positions(segments)
    segment_mask, mask_words = _tile_masks(
        grouping, segment, np.repeat(first, segments), np.repeat(stop, segments)
    )
    return Plan(
        tile_ptr=_offsets(np.bincount(shape, minlength=len(target.tile_rows))),
        item_segment_ptr=_offsets(segments),
        item_query_ptr=_offsets(count),
        segment_row=grouping.row[segment],
        segment_start=grouping.start[segment],
        segment_end=np.where(grouping.open[segment], np.int32(OPEN_END), grouping.end[segment]),
        segment_mask=segment_mask,
        mask_words=mask_words,
        entry_query=entry_query,
        entry_slot=entry_slot,
        reduce_query=reduce_query,
        reduce_ptr=reduce_ptr,
    )


@lru_cache(maxsize=256)
def _say_once(message: str) -> None:
    logger.warning("%s", message)


def _positions(counts: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """0 … counts[0]-1, 0 … counts[1]-1, …"""
    counts = np.asarray(counts, dtype=np.int64)
    begin = np.cumsum(counts) - counts
    within: npt.NDArray[np.int64] = np.arange(counts.sum()) - np.repeat(begin, counts)
    return within


def _offsets(counts: npt.NDArray[np.integer]) -> Int32Array:
    """CSR pointer array of `counts`."""
    return np.concatenate(([0], np.cumsum(counts))).astype(np.int32)


def _partial_slots(
    entry_query: Int32Array, forest: PrefixForest
) -> tuple[Int32Array, Int32Array, Int32Array]:
    """Partial slot of every entry, and the queries that need a reduction with their slots."""
    parts = np.bincount(entry_query, minlength=forest.batch_size)
    if forest.batch_size and parts.min() == 0:
        raise PlanError(
            f"request {int(parts.argmin())} belongs to no group; a policy must cover every request"
        )
    reduce_query = np.flatnonzero(parts > 1).astype(np.int32)
    reduce_ptr = _offsets(parts[reduce_query])
    first_slot = np.full(forest.batch_size, DIRECT, dtype=np.int64)
    first_slot[reduce_query] = reduce_ptr[:-1]

    by_query = np.argsort(entry_query, kind="stable")
    nth = np.empty(len(entry_query), dtype=np.int64)
    nth[by_query] = _positions(parts)
    slot = np.where(parts[entry_query] > 1, first_slot[entry_query] + nth, DIRECT)
    return slot.astype(np.int32), reduce_query, reduce_ptr


def _tile_masks(
    grouping: Grouping,
    segment: npt.NDArray[np.int64],
    first: npt.NDArray[np.int64],
    stop: npt.NDArray[np.int64],
) -> tuple[Int32Array, npt.NDArray[np.uint64]]:
    """Cut each segment's mask over its group down to the queries of its tile."""
    offsets = np.full(len(segment), -1, dtype=np.int32)
    words: list[int] = []
    if grouping.masked:
        for at in np.flatnonzero(np.diff(grouping.mask_ptr)[segment] > 0).tolist():
            s = int(segment[at])
            bits = 0
            for word in reversed(
                grouping.mask_words[grouping.mask_ptr[s] : grouping.mask_ptr[s + 1]]
            ):
                bits = bits << 64 | int(word)
            count = int(stop[at] - first[at])
            bits = bits >> int(first[at]) & ((1 << count) - 1)
            offsets[at] = len(words)
            words.extend(bits >> shift & 0xFFFF_FFFF_FFFF_FFFF for shift in range(0, count, 64))
    return offsets, np.array(words, dtype=np.uint64)


def _check_capacity(plan: Plan, capacity: PlanCapacity) -> None:
    for what, held, limit in (
        ("work items", plan.num_items, capacity.max_items),
        ("(item, query) pairs", len(plan.entry_query), capacity.max_entries),
        ("KV ranges", len(plan.segment_row), capacity.max_segments),
        ("mask words", len(plan.mask_words), capacity.max_mask_words),
    ):
        if held > limit:
            raise PlanError(f"the plan has {held} {what}; its arrays hold {limit}")
