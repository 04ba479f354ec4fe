"""The benchmark set `verify` without a GPU: its workloads, results, and FlashInfer's prefill."""

import numpy as np
import pytest
import torch

from benchmarks.kernel.measure_case import Setup, measure_case
from benchmarks.kernel.methods import OURS, make_method
from benchmarks.kernel.methods.ours import Ours
from benchmarks.kernel.sets import Spec
from benchmarks.kernel.tree_workloads import VERIFY, Case, Workload, described
from benchmarks.kernel.verified_workloads import bits_of, seen_by
from benchmarks.papers.workloads import drafted
from deft_backend.attention.reference_attention import seen_tokens

CPU = torch.device("cpu")
PEERS = ("flash-decoding", "deft-node-chunk", "deft-flatten", "fasttree", "flashforge")
PARENTS = (-1, 0, 0, 1, 3)
CASES = {
    "drafts": drafted([Workload(VERIFY, "drafts", described("1,2,3 16,5,2").describe)], 5)[0],
    "chain": Workload(VERIFY, "chain", described("1,3 32,21").describe, 16, 5),
    "tree": Workload(VERIFY, "tree", described("1,3 32,21").describe, 16, 5, PARENTS),
}


def test_bits_say_who_sees_whom():
    seen = seen_by(PARENTS, 5)
    assert np.flatnonzero(seen[4]).tolist() == [0, 1, 3, 4]
    bits = torch.from_numpy(bits_of(seen))
    assert torch.equal(seen_tokens(5, 5, bits), torch.from_numpy(seen))


@pytest.mark.parametrize("mask", CASES)
def test_results_are_checked(mask):
    spec = Spec(head_dim=64, planner="device")
    peers = [make_method(name, "device") for name in PEERS] if mask == "drafts" else []
    measured = Setup(spec, Ours(OURS, "auto", "device"), peers, CPU, 15, None, {})
    row = measure_case(Case(CASES[mask], 4, 2, 16), measured)
    assert all(error < 1e-3 for error in row["error"].values())
    kind = "chain" if mask == "chain" else "tree"
    assert (row["query_tokens"], row["mask"], row["skipped"]) == (5, kind, {})
    assert row["repeatable"]
