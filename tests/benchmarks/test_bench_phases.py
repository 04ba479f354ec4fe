"""The separate launches of a plan together give the plan's result."""

import pytest
import torch

from benchmarks.kernel import measure_case as run_module
from benchmarks.kernel.batched_reference import batched_reference
from benchmarks.kernel.case_inputs import make_inputs
from benchmarks.kernel.measure_case import Setup, measure_case
from benchmarks.kernel.methods import OURS
from benchmarks.kernel.methods.ours import Ours
from benchmarks.kernel.phases import alone
from benchmarks.kernel.tree_workloads import Case, Workload, forest_from_parents
from deft_backend.attention.reference_attention import relative_error
from deft_backend.tools.tuning.launch_clock import QUICK

CPU = torch.device("cpu")
PARENTS = [-1, *[0] * 9, -1, 10, 10, -1]
TOKENS = [300, *range(1, 10), 40, 3, 5, 700]
"""Nine leaves on a shared node, two requests that fit a small tile, and a long unshared request."""


def make_case(heads=(4, 2)):
    forest = forest_from_parents(PARENTS, TOKENS)
    return Case(Workload("own", "a tree", lambda: forest), *heads, 1)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("deft-node", ["large_tile", "small_tile", "reduction"]),
        ("deft-flatten", ["masked_tile", "reduction"]),
        ("flash-decoding", ["small_tile"]),
    ],
)
def test_launches_one_after_the_other_compute_the_plan(policy, expected):
    inputs = make_inputs(make_case(), 64, torch.float16, CPU, "shuffled", 0)
    names, out = [], torch.empty(0)
    for name, launch in Ours(OURS, policy).phases(inputs):
        if not names:
            launch().fill_(torch.nan)  # NaN shows elements that no launch writes
        names.append(name)
        out = launch()
    reference = batched_reference(
        inputs.q, inputs.k_cache, inputs.v_cache, inputs.page_table, inputs.seq_lens
    )
    assert set(expected) <= set(names) <= {"masked_tile", "large_tile", "small_tile", "reduction"}
    assert names == sorted(
        names, key=["masked_tile", "large_tile", "small_tile", "reduction"].index
    )
    assert relative_error(out, reference) < 1e-3


def test_each_item_is_in_one_of_them():
    inputs = make_inputs(make_case(), 64, torch.float16, CPU, "shuffled", 0)
    plan = Ours(OURS, "deft-node").attention(inputs).plan(inputs.forest)
    parts = alone(plan)
    assert sum(int(part.tile_ptr[-1] - part.tile_ptr[0]) for part in parts.values()) == (
        plan.num_items
    )
    assert [len(part.reduce_query) > 0 for part in parts.values()] == [
        name == "reduction" for name in parts
    ]


def test_their_times_are_facts(monkeypatch):
    monkeypatch.setattr(run_module, "launch_us", lambda launch, budget: launch() is None or 2.5)
    setup = Setup(
        ours=Ours(OURS, "deft-node"), peers=[], head_dim=64, dtype="fp16", device=CPU,
        layout="shuffled", seed=0, graph=False, budget=QUICK, ceilings=None, unavailable={},
        phases=True,
    )  # fmt: skip
    facts = measure_case(make_case(), setup)["facts"]["deft"]
    assert {name for name in facts if name.endswith("_alone_ns")} == {
        "large_tile_alone_ns", "small_tile_alone_ns", "reduction_alone_ns",
    }  # fmt: skip
    assert facts["large_tile_alone_ns"] == 2500
