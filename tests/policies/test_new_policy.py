"""A policy of one's own, and the policies that no server runs."""

from typing import ClassVar

import pytest
import torch

from attention_checks import tree_attention
from deft_backend import PolicyError
from deft_backend.attention.reference_attention import reference_attention, relative_error
from deft_backend.policies import POLICIES, FlashDecoding, Policy, Rules
from deft_backend.policies.policy import TwoRulePolicy


class Halves(TwoRulePolicy):
    """All that CONTRIBUTING asks of a policy of two rules, besides its name in the lists."""

    name: ClassVar[str] = "halves"
    rules: ClassVar[Rules] = Rules("all", "fixed", 32)


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


class ReferenceOnly(Policy):
    """A policy that only the reference follows."""

    name: ClassVar[str] = "reference-only"

    def group(self, forest, target):
        return FlashDecoding().group(forest, target)


class Unknown(ReferenceOnly):
    rules = Rules("all", "by-the-moon")


class Greedy(ReferenceOnly):
    rules = Rules("greedy", "filling")


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (ReferenceOnly(), "it has no rules for the device planner"),
        (Unknown(), "the device planner does not know its rules (all, by-the-moon)"),
        (Greedy(), "the rule greedy needs a class derived from FastTree"),
    ],
)
def test_a_policy_without_known_rules_is_refused_at_start(policy, reason, monkeypatch):
    """By the counters, which adapters attach at start, and by the device planner."""
    monkeypatch.setitem(POLICIES, policy.name, policy)
    attention = tree_attention(policy=policy.name)
    for start in (lambda: attention.counters, lambda: attention.device_planner):
        with pytest.raises(PolicyError) as refused:
            start()
        assert str(refused.value) == f"no server runs policy reference-only: {reason}"


def test_the_library_follows_a_policy_without_rules(monkeypatch):
    policy = ReferenceOnly()
    monkeypatch.setitem(POLICIES, policy.name, policy)
    attention = tree_attention(policy=policy.name, max_batch=2)
    attention.plan_batch(torch.tensor([[0, 1], [0, 2]]).int(), torch.tensor([2, 2]))
    assert attention.batch.plan.loaded_tokens(torch.tensor([2, 2]).numpy()) == 4
