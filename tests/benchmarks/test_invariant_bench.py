"""The benchmark of `invariant`: the policy's bits are the same, and another policy's are not."""

from dataclasses import replace

import pytest
import torch

from benchmarks import invariant
from benchmarks.kernel.tree_workloads import described

CPU = torch.device("cpu")
SMALL = invariant.Shape("small", "4/2", head_dim=64)


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    forest = described("1,3 16,21").forest
    monkeypatch.setattr(invariant, "mixed_forest", lambda seed, requests: forest)
    monkeypatch.setattr(invariant, "MOST_TOKENS", 2048)


@pytest.mark.parametrize(
    "shape", [SMALL, replace(SMALL, query_tokens=2), replace(SMALL, kv_dtype=torch.float8_e4m3fn)]
)
def test_bits_are_compared_batch_by_batch(shape):
    row = invariant.compare(shape, CPU, 4.0, 3, (2, 4))
    assert (row["differ"], row["differ_with_plans_of_the_cpu"]) == (0, 0)
    assert row["requests"] > 0
    assert shape.query_tokens > 1 or 0 < row["error"] < 1e-2


def test_other_bits_are_seen(monkeypatch):
    launch = invariant.Pool.launch

    def disturbed(self, attention, batch, **options):
        return launch(self, attention, batch, **options) * (1 + 0.01 * (len(batch.q) > 1))

    monkeypatch.setattr(invariant.Pool, "launch", disturbed)
    assert invariant.compare(SMALL, CPU, 2.0, 3, (4,))["differ"] > 0
