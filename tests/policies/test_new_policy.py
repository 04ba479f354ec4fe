"""A policy of one's own."""

from typing import ClassVar

import pytest
import torch

from attention_checks import tree_attention
from deft_backend.attention.reference_attention import reference_attention, relative_error
from deft_backend.policies import POLICIES, Rules
from deft_backend.policies.policy import TwoRulePolicy


class Halves(TwoRulePolicy):
    """All that CONTRIBUTING asks of a policy of two rules, besides its name in the lists."""

    name: ClassVar[str] = "halves"

    @property
    def rules(self):
        return Rules("all", "fixed", 32)


@pytest.mark.parametrize("on_device", [None, True])
def test_a_policy_is_a_name_and_two_rules(on_device, monkeypatch):
    """Both planners take it."""
    monkeypatch.setitem(POLICIES, "halves", Halves())
    table = torch.arange(20).repeat(3, 10).int()
    table[:, 100:] += torch.tensor([[0], [100], [200]])
    lens = torch.tensor([140, 120, 101])
    q, (k, v) = torch.randn(3, 4, 64), torch.randn(2, 220, 1, 2, 64)
    attention = tree_attention(max_batch=3, policy="halves")
    attention.plan_batch(table, lens, on_device=on_device)
    out = attention.run(q, k, v, table, lens)
    assert relative_error(out, reference_attention(q, k, v, table, lens)) < 2e-6
    assert attention.counters[:3].tolist() == [1, 361, 100 + 40 + 20 + 1]
