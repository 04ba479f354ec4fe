"""The host planner: it plans a forest whenever the batch's composition changes."""

import logging

import numpy as np

from deft_backend.forest import PrefixForest
from deft_backend.planner.fill_plan import fill_plan
from deft_backend.planner.items import list_items
from deft_backend.planner.plan import Plan, PlanCapacity
from deft_backend.policies import FlashDecoding, Grouping, Policy, PolicyError, Target
from deft_backend.shapes.kernel_limits import MAX_TOKENS

logger = logging.getLogger(__name__)


class PlanError(ValueError):
    """The plan's arrays cannot hold the forest, or a grouping leaves out a request."""


def plan_forest(
    forest: PrefixForest, policy: Policy, target: Target, capacity: PlanCapacity
) -> tuple[Plan, Grouping]:
    """Group a forest by `policy` and cut it into work items that fit `capacity`.

    If the arrays cannot hold the policy's items, each request reads its whole context by itself, in
    chunks by the policy's rule. This always fits, and plans of the device do the same. The log
    gives the reason once. Returns the plan and the groups behind it.

    Raises PlanError if the batch is larger than `capacity.max_batch`, or a request is too long for
    the kernels.
    """
    if forest.batch_size > capacity.max_batch:
        raise PlanError(
            f"the batch holds {forest.batch_size} requests; the plan was sized for "
            f"{capacity.max_batch}: raise max_batch"
        )
    longest = int(forest.seq_lens.max(initial=0))
    if longest >= MAX_TOKENS:
        raise PlanError(
            f"a request holds {longest} tokens; the kernels read at most {MAX_TOKENS - 1}"
        )
    room = capacity.room(policy, forest.batch_size, target)
    bounded = target.within(room.max_items, room.max_entries, room.max_segments)
    try:
        grouping = policy.group(forest, bounded)
        plan = plan_grouping(grouping, forest, target)
        check_capacity(plan, capacity)
    except (PolicyError, PlanError) as error:
        _say_once(policy.name, error)
        grouping = FlashDecoding(policy.rules).group(forest, bounded)
        plan = plan_grouping(grouping, forest, target)
        check_capacity(plan, capacity)
    return plan, grouping


def plan_grouping(grouping: Grouping, forest: PrefixForest, target: Target) -> Plan:
    """Cut groups into items and assign the slots of their partial results.

    A group with more queries than the largest tile is cut into even tiles. Each item runs in the
    smallest tile shape that holds it. Within a shape the longest items come first
    (longest-processing-time order, FlashForge section 5.1).

    A query with one item needs no slot: the item writes the output. Other queries get contiguous
    slots in item order. An item of the last launch merges the others if they are at most
    MAX_MERGED; else stage 2 merges.

    Raises PlanError if some request of the batch belongs to no group.
    """
    if target.largest_tile < 1:
        raise PlanError(
            f"{target.query_vectors} query vectors share a KV head; the largest tile holds "
            f"{max(target.tile_heights)}"
        )
    items = list_items(
        grouping.query_ptr, grouping.segment_ptr, grouping.start, grouping.end,
        grouping.attend_begin, grouping.attend_end, np.array(target.tile_queries, dtype=np.int64),
        np.array(target.tile_segments, dtype=np.int64),
    )  # fmt: skip
    filled = fill_plan(
        items, grouping.query_ptr, grouping.queries, grouping.request, grouping.start, grouping.end,
        grouping.open, grouping.attend_begin, grouping.attend_end, forest.batch_size,
        target.query_blocks, len(target.tile_heights),
    )  # fmt: skip
    if forest.batch_size and filled.parts.min() == 0:
        raise PlanError(
            f"request {int(filled.parts.argmin())} belongs to no group; a policy must cover every "
            "request"
        )
    return Plan(*filled[:-1])


_said: set[tuple[str, type[Exception]]] = set()


def _say_once(policy: str, error: Exception) -> None:
    """Log only the first such batch of each policy, because the numbers differ in each batch."""
    if (policy, type(error)) not in _said:
        _said.add((policy, type(error)))
        logger.warning(
            "deft: policy %s cannot plan this batch (%s). In such batches each request reads its "
            "whole context; DEFT_POLICY names another policy", policy, error,
        )  # fmt: skip


def check_capacity(plan: Plan, capacity: PlanCapacity) -> None:
    """Raise PlanError, which names the array that is too small, for a plan that does not fit."""
    for what, held, limit in (
        ("work items", plan.num_items, capacity.max_items),
        ("(item, query) pairs", len(plan.entry_query), capacity.max_entries),
        ("KV ranges", len(plan.segment_request), capacity.max_segments),
    ):
        if held > limit:
            raise PlanError(f"the plan has {held} {what}; its arrays hold {limit}")
