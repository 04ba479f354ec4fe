"""CONTRIBUTING's steps to add a policy, taken literally, and the policies that no server runs."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import deft_backend
from attention_checks import tree_attention
from deft_backend import PolicyError
from deft_backend.policies import POLICIES, FlashDecoding, Policy, Rules

PACKAGE = Path(deft_backend.__file__).parent

HALVES = """
from typing import ClassVar

from deft_backend.policies.policy import Rules, TwoRulePolicy
from deft_backend.settings.policy_names import HALVES


class Halves(TwoRulePolicy):
    name: ClassVar[str] = HALVES

    @property
    def rules(self) -> Rules:
        return Rules("all", "fixed", 32)
"""

SERVE = """
import torch

from deft_backend import TreeAttention
from deft_backend.attention.reference_attention import reference_attention, relative_error
from deft_backend.settings.config import Settings

table = torch.arange(20).repeat(3, 10).int()
table[:, 100:] += torch.tensor([[0], [100], [200]])
lens = torch.tensor([140, 120, 101])
q, (k, v) = torch.randn(3, 4, 64), torch.randn(2, 220, 1, 2, 64)
for on_device in (None, True):
    attention = TreeAttention(
        num_query_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float32, device="cpu",
        max_batch=3, policy=Settings.from_env().policy,
    )
    attention.plan_batch(table, lens, on_device=on_device)
    out = attention.run(q, k, v, table, lens)
    assert relative_error(out, reference_attention(q, k, v, table, lens)) < 2e-6
    print(attention.policy.name, attention.counters[:3].tolist())
"""


def test_the_steps_to_add_a_policy(tmp_path):
    """A file of its own, a name, a class in the list: servers and both planners take it."""
    package = tmp_path / "deft_backend"
    shutil.copytree(PACKAGE, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "policies/halves.py").write_text(HALVES)
    for file, changes in {
        "settings/policy_names.py": [
            ('AUTO = "auto"\n', 'AUTO = "auto"\nHALVES = "halves"\n'),
            ("    AUTO,\n", "    AUTO,\n    HALVES,\n"),
        ],
        "policies/__init__.py": [
            ("\nPOLICIES", "\nfrom deft_backend.policies.halves import Halves\n\nPOLICIES"),
            ("        Auto(),\n", "        Auto(),\n        Halves(),\n"),
        ],
    }.items():
        text = (package / file).read_text()
        for old, new in changes:
            assert text.count(old) == 1
            text = text.replace(old, new)
        (package / file).write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", SERVE],
        env={"DEFT_POLICY": "halves", "TRITON_INTERPRET": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    read = [1, 361, 100 + 40 + 20 + 1]
    assert done.stdout.splitlines() == [f"halves {read}"] * 2, done.stderr


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
