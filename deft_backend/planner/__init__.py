"""Planner: a policy's groups become the kernels' work items."""

from deft_backend.planner.device_plan import DevicePlan
from deft_backend.planner.plan import Plan, PlanCapacity
from deft_backend.planner.reference import PlanError, check_capacity, plan_forest, plan_grouping

__all__ = [
    "DevicePlan",
    "Plan",
    "PlanCapacity",
    "PlanError",
    "check_capacity",
    "plan_forest",
    "plan_grouping",
]
