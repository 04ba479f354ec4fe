"""The oracles: dynamic programming against all assignments, and plans that no policy undercuts."""

from itertools import product

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import policy_gaps
from benchmarks.kernel.tree_workloads import described
from benchmarks.row_files import write_rows
from deft_backend.policies.fasttree import EdgeCosts
from strategies import batches, check_coverage

GQA = policy_gaps.target_on_hopper("32/8")
weights = st.integers(0, 30_000)
tiles = st.sampled_from([((8, 64), (16, 64)), ((2, 6), (32, 32)), ((4,), (128,))])


@settings(max_examples=60, deadline=None)
@given(batch=batches(max_requests=6), weights=st.tuples(weights, weights, weights), tiles=tiles)
def test_the_least_cost_of_edges_is_that_of_all_assignments(batch, weights, tiles):
    forest = batch.forest()
    costs = EdgeCosts(*weights, 2, *tiles)
    inner = np.flatnonzero(forest.parent >= 0)
    found = []
    for cut in product([False, True], repeat=min(len(inner), 9)):
        is_cut = np.zeros(forest.num_nodes, dtype=bool)
        is_cut[inner[: len(cut)]] = cut
        found.append(policy_gaps.edges_cost(forest, is_cut, costs))
    if len(inner) <= 9:
        assert policy_gaps.least_edges_cost(forest, costs) == min(found)
    else:
        assert policy_gaps.least_edges_cost(forest, costs) <= min(found)


def test_estimates_are_compared_with_recorded_times(tmp_path):
    """By hand: 8 contexts of 8,192 tokens, whole, on more programs than items."""
    costs = policy_gaps.target_on_hopper("32/8", "NVIDIA H200").costs
    ns = {
        "profile": float(costs.time(8, 8192)) * 1e6,
        "tiles": costs.tiles.item_ns[0] + 8192 * costs.tiles.token_ns[0],
    }
    row = {"set": "unshared", "heads": "32/8", "workload": "8 8192", "us": {"deft-node": 100.0}}
    write_rows(tmp_path / "record.json", [row], {})
    for found in policy_gaps.estimate_rows(tmp_path / "record.json"):
        assert (found["plans"], found["spread"], found["picks"]) == (1, 0.0, 1.0)
        assert found["ratio"] == round(ns[found["estimator"]] / 1e5, 2)


def test_fasttrees_cost_of_edges_by_hand():
    """Two queries on 100 tokens, with 10 tokens each: one tile of 4 vectors, on 32 tokens."""
    forest = described("1,2 100,10").forest
    costs = EdgeCosts(3, 5, 7, 1, (4,), (32,))
    node, leaf = 3 * 2 * 100, 3 * 3 * 10 + 5 * (32 - 10) + 7
    assert policy_gaps.edges_cost(forest, np.array([True, True, True]), costs) == node + 2 * leaf
    assert policy_gaps.edges_cost(forest, np.array([True, False, False]), costs) == 2 * 3 * 3 * 110


@settings(max_examples=15, deadline=None)
@given(batch=batches(max_requests=5).filter(lambda batch: len(batch.seq_lens) > 0))
def test_no_policy_is_better_than_the_oracle(batch):
    forest = batch.forest()
    check_coverage(
        batch, policy_gaps.Oracle().group(forest, GQA), GQA, np.zeros(len(batch.seq_lens), int)
    )
    best = policy_gaps.best_choice(forest, GQA).cost
    assert all(
        policy_gaps.choice_of(name, forest, GQA).cost >= best for name in policy_gaps.POLICIES
    )
