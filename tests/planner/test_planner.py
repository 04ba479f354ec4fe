"""Plans from the kernels' side: every query's tokens once, every partial result in its place."""

from dataclasses import astuple, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deft_backend import policies
from deft_backend.costs.cost_model import TileCosts, default_cost_model
from deft_backend.forest import build_forest
from deft_backend.planner import (
    DevicePlan,
    PlanCapacity,
    PlanError,
    plan_forest,
    plan_grouping,
    reference,
)
from deft_backend.planner.encoding import DIRECT, MERGES, OPEN_END
from deft_backend.planner.on_device import DevicePlanner
from strategies import (
    GROWTH,
    Segment,
    batch_of,
    batches,
    check_plan,
    grouping_of,
    regular_forest,
    targets,
)

GQA = policies.Target(num_query_heads=8, num_kv_heads=2, head_dim=64, num_programs=16)


@pytest.mark.parametrize("name", policies.POLICY_NAMES)
@settings(max_examples=80)
@given(batch=batches(), target=targets, data=st.data())
def test_plans_cover_every_query_once(name, batch, target, data):
    forest = batch.forest()
    plan = plan_grouping(policies.get_policy(name).group(forest, target), forest, target)
    rows = len(batch.seq_lens)
    check_plan(batch, plan, target)
    growth = data.draw(st.lists(st.integers(0, GROWTH), min_size=rows, max_size=rows))
    check_plan(batch, plan, target, np.array(growth, dtype=np.int32))


def wide_batch(lens, shared):
    """Requests that share one prefix, or as much of it as they hold."""
    agreed = [min(shared, *pair) for pair in pairwise(lens)]
    return batch_of(build_forest(range(len(lens)), agreed, list(lens)))


@pytest.mark.parametrize("name", policies.POLICY_NAMES)
@pytest.mark.parametrize(
    ("lens", "shared"),
    [
        *(([103] * requests, 100) for requests in (1, 2, 3, 16, 17, 32, 33, 200)),
        ([256, 256, 260], 256),  # ends at the end of a KV block
        (range(100, 300), 100),
        (range(200), 100),
        ([50] * 3, 50),
        ([0, 50, 0], 50),
        ([300], 100),
    ],
)
def test_every_tile_shape_and_special_batches(name, lens, shared):
    batch = wide_batch(lens, shared)
    forest = batch.forest()
    plan = plan_grouping(policies.get_policy(name).group(forest, GQA), forest, GQA)
    check_plan(batch, plan, GQA, 7)


def _corruptions(plan):
    found = {}
    for name, array in plan.arrays().items():
        places = (0, len(array) // 2, -1) if len(array) else ()
        if name == "segment_request":  # any row of the same prefix is equivalent
            places = np.flatnonzero(plan.segment_end == OPEN_END)[[0, -1]]
        for at in places:
            for by in (-1, 1):
                moved = array.copy()
                moved[at] += by
                found[f"{name}[{at}] {by:+}"] = replace(plan, **{name: moved})
    found["all ends fixed"] = replace(plan, segment_end=np.maximum(plan.segment_end, 160))
    for slot in (DIRECT, 0):
        dropped = plan.entry_slot.copy()
        dropped[np.flatnonzero(dropped != slot)[0]] = slot
        found[f"a slot is {slot}"] = replace(plan, entry_slot=dropped)
    if len(plan.reduce_query):
        found["a query not reduced"] = replace(
            plan, reduce_query=plan.reduce_query[:-1], reduce_ptr=plan.reduce_ptr[:-1]
        )
    for entry in np.flatnonzero(plan.entry_slot <= MERGES)[:1]:
        moved = plan.entry_slot.copy()
        moved[entry] -= 1
        found["merges another's results"] = replace(plan, entry_slot=moved)
    return found


@pytest.mark.parametrize("name", ["deft-node", "deft-flatten", "deft-node-chunk"])
def test_the_checker_finds_every_corruption(name):
    batch = wide_batch([360] * 20, 300)
    target = replace(GQA, tile_segments=(1, 1, 2))
    plan = plan_grouping(
        policies.get_policy(name).group(batch.forest(), target), batch.forest(), target
    )
    check_plan(batch, plan, target, 1)
    missed = []
    for what, corrupted in _corruptions(plan).items():
        try:
            check_plan(batch, corrupted, target, 1)
            missed.append(what)
        except (AssertionError, IndexError):
            pass
    assert not missed


@pytest.mark.parametrize("run", [(0, 2), (1, 3)])
def test_a_range_that_some_of_its_queries_skip_goes_to_the_packed_tile(run):
    """In tiles of one range, every query attends to the whole range."""
    batch = wide_batch([60] * 3, 50)
    groups = [([0, 1, 2], Segment(run[0], 0, 50, False, *run))]
    for row in range(3):
        start = 50 if row in range(*run) else 0
        groups.append(([row], Segment(row, start, 60, True, 0, 1)))
    plan = plan_grouping(grouping_of(groups), batch.forest(), GQA)
    check_plan(batch, plan, GQA)
    assert np.diff(plan.items_of(len(GQA.tile_heights) - 1)) == 1


@given(lens=st.lists(st.integers(1, 4), min_size=1, max_size=40))
def test_items_come_longest_first_and_equal_ones_in_the_order_of_the_policy(lens):
    forest = build_forest(range(len(lens)), [0] * (len(lens) - 1), lens)
    plan = plan_grouping(policies.get_policy("deft-node").group(forest, GQA), forest, GQA)
    assert plan.segment_request.tolist() == sorted(range(len(lens)), key=lambda row: -lens[row])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((1,), (1, 1060, 1068, 1062)),
        ((100, 37), (100, 696, 1496, 896)),
        ((100, 37, 1 << 19), (100, 696, 512, 896)),  # what the workspace's 256 MiB hold
        ((100, 37, 1 << 30), (100, 696, 237, 896)),  # two a query and one a program always fit
    ],
)
def test_the_room_for_a_batch(given, expected):
    """Four items a query and twelve entries, and eight of both for each program."""
    capacity = PlanCapacity.for_batch(*given)
    assert astuple(capacity) == expected
    assert capacity.limits == expected[1:]
    target = replace(GQA, tile_programs=(37, 4, 9))
    large = PlanCapacity(2000, 9000, 9000, 9000)
    assert large.room(policies.get_policy("auto"), 100, target) is large
    assert astuple(large.room(policies.get_policy("deft-node-chunk"), 100, target)) == (
        *(2000, 696, 1496, 896),
    )


@pytest.mark.parametrize("entry_bytes", [0, 32 * 264, 64 * 264, 1 << 20, 1 << 30])
@pytest.mark.parametrize("batch", [1, 7, 1024, 4096])
def test_one_chunk_a_query_fits_every_capacity(batch, entry_bytes):
    capacity = PlanCapacity.for_batch(batch, 33, entry_bytes)
    forest = build_forest(range(batch), [40] * (batch - 1), np.full(batch, 1000))
    target = replace(GQA, num_programs=4096)
    for name in ("auto", "deft-node-chunk", "flash-decoding"):
        plan, grouping = plan_forest(forest, policies.get_policy(name), target, capacity)
        assert plan.num_items <= capacity.max_items
        assert plan.num_partials <= len(plan.entry_query) <= capacity.max_entries
        assert len(plan.segment_request) <= capacity.max_segments
        assert np.bincount(grouping.queries, minlength=batch).min() > 0


def test_limits_are_named():
    forest = regular_forest([1, 3], [100, 10])
    with pytest.raises(PlanError, match=r"the batch holds 3 requests; the plan was sized for 2"):
        plan_forest(forest, policies.get_policy("auto"), GQA, PlanCapacity.for_batch(2))
    long = build_forest([0], [], [1 << 25])
    with pytest.raises(PlanError, match="a request holds 33554432 tokens"):
        plan_forest(long, policies.get_policy("auto"), GQA, PlanCapacity.for_batch(1))
    grouping = grouping_of([([0, 2], Segment(0, 0, 100, False, 0, 2))])
    with pytest.raises(PlanError, match="request 1 belongs to no group"):
        plan_grouping(grouping, forest, GQA)
    with pytest.raises(PlanError, match="256 query vectors share a KV head; the largest tile"):
        plan_grouping(grouping, forest, policies.Target(256, 1, 64))


def test_what_does_not_fit_is_read_request_by_request(caplog, monkeypatch):
    """The log gives the reason once a policy."""
    monkeypatch.setattr(reference, "_said", set())
    forest = regular_forest([1, 8, 8], [100, 50, 20])
    capacity = PlanCapacity(max_batch=64, max_items=70, max_entries=140, max_segments=140)
    for _ in range(2):
        plan, grouping = plan_forest(forest, policies.get_policy("deft-node"), GQA, capacity)
        assert (np.bincount(grouping.queries) == 1).all()
        assert plan.loaded_tokens(forest.seq_lens) == forest.tokens_attended
    assert [record.getMessage() for record in caplog.records] == [
        "deft: policy deft-node cannot plan this batch (deft-node makes 76 items of this batch and "
        "the plan holds 70; raise the plan's capacity or choose flash-decoding). In such batches "
        "each request reads its whole context; DEFT_POLICY names another policy"
    ]


@pytest.mark.parametrize("policy", ["auto", "flashforge", "flash-decoding"])
def test_a_bad_cost_table_is_an_error_and_no_batch_that_does_not_fit(policy):
    model = default_cost_model()
    three = replace(model, tiles=TileCosts((1.0,) * 3, (1.0,) * 3, 1.0, 1.0))
    forest, target = regular_forest([1, 3], [100, 10]), replace(GQA, cost_model=three)
    capacity = PlanCapacity.for_batch(3)
    expected = "the cost table holds 3 tile shapes; expected 2"
    with pytest.raises(policies.PolicyError, match=f"{expected}: measure .* `deft tune` .table: "):
        plan_forest(forest, policies.get_policy(policy), target, capacity)
    plan, cpu = DevicePlan(capacity, torch.device("cpu")), torch.device("cpu")
    with pytest.raises(policies.PolicyError, match=expected):
        DevicePlanner(target, policies.get_policy(policy), plan, cpu, 1, overlapped=False)
