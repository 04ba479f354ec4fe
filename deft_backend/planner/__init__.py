"""Planner: a policy's groups become the kernels' work items."""

from deft_backend.planner.device_plan import DevicePlan
from deft_backend.planner.host import PlanError, check_capacity, plan_forest, plan_grouping
from deft_backend.planner.plan import (
    DIRECT,
    ITEM_ORDER,
    OPEN_END,
    READ_AHEAD,
    TILE_ROWS,
    TILE_SEGMENTS,
    Plan,
    PlanCapacity,
)
from deft_backend.policies.range_choice import MAX_MERGED

__all__ = [
    "DIRECT",
    "ITEM_ORDER",
    "MAX_MERGED",
    "OPEN_END",
    "READ_AHEAD",
    "TILE_ROWS",
    "TILE_SEGMENTS",
    "DevicePlan",
    "Plan",
    "PlanCapacity",
    "PlanError",
    "check_capacity",
    "plan_forest",
    "plan_grouping",
]
