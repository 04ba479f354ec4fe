"""Sizes of a plan's arrays, each where it alone binds: the device decides as the reference does.

The reference tells at which sizes its plan of a batch changes. The device planner must change its
plan at the same ones.
"""

from functools import cache

import pytest
from test_device_planner import all_candidates, items_of, plans_of

from deft_backend.planner import PlanCapacity, plan_forest
from deft_backend.policies import POLICIES, Target
from strategies import batch_of, check_plan, regular_forest

__all__ = ["all_candidates"]

pytestmark = pytest.mark.usefixtures("all_candidates")

AMPLE = 100_000
TARGET = Target(num_query_heads=8, num_kv_heads=2, head_dim=64, block_tokens=16, num_programs=33)
BATCH = batch_of(regular_forest([1, 4, 2], [600, 40, 30]))
"""A root, four nodes of two requests each, and eight leaves."""


def capacity(name, places):
    """Arrays with room for all but one thing.

    There must be a KV range for each item: a limit on ranges comes with as many items as any plan
    of `deft-flatten` has.
    """
    sizes = {"items": AMPLE, "entries": AMPLE, "segments": AMPLE, name: places}
    if name == "segments":
        sizes["items"] = 16
    return PlanCapacity(8, sizes["items"], sizes["entries"], sizes["segments"])


@cache
def changes(policy, name):
    """Where one more place lets the reference make another plan."""
    plans = {}
    for places in range(16 if name == "segments" else 8, 400):
        plan, _ = plan_forest(BATCH.forest(), POLICIES[policy], TARGET, capacity(name, places))
        plans[places] = items_of(plan)
    found = [places for places in plans if plans.get(places - 1, plans[places]) != plans[places]]
    return sorted({*found[:2], *found[-1:]})


@pytest.mark.parametrize(
    ("policy", "name"),
    [
        *((policy, name) for policy in ("auto", "deft-node") for name in ("items", "entries")),
        *(("deft-node-chunk", name) for name in ("items", "entries")),
        *(("deft-flatten", name) for name in ("items", "entries", "segments")),
    ],
)
def test_the_device_finds_each_limit_where_the_reference_does(policy, name):
    limits = changes(policy, name)
    assert limits
    for places in (places - less for places in limits for less in (1, 0)):
        held = capacity(name, places)
        _, made = plans_of(BATCH, TARGET, held, policy=POLICIES[policy])
        check_plan(BATCH, made, TARGET)
        assert made.num_items <= held.max_items
        assert len(made.entry_query) <= held.max_entries
        assert len(made.segment_request) <= held.max_segments
