"""The choice of the planner, and the number of requests that the device planner holds."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from deft_backend.config import Settings
from deft_backend.hosts.common.planner_choice import (
    planned_on_device,
    policy_selects_device_planner,
    selects_device_planner,
)
from deft_backend.planner.on_device import largest_batch
from deft_backend.policies import POLICY_NAMES


@pytest.mark.parametrize(
    ("planner", "device", "capability", "heads", "head_dim", "changed", "expected", "said"),
    [
        ("auto", "cuda", (9, 0), (32, 8), 128, {}, True, ""),
        ("auto", "cuda", (9, 0), (64, 8), 128, {}, False, ""),  # not measured without sharing
        ("auto", "cuda", (9, 0), (16, 4), 128, {}, False, ""),
        ("auto", "cuda", (9, 0), (32, 8), 64, {}, False, ""),
        ("auto", "cuda", (8, 0), (32, 8), 128, {}, False, ""),
        ("auto", "cuda", (9, 0), (32, 8), 128, {"verify": True}, False, ""),
        ("auto", "cuda", (9, 0), (32, 8), 128, {"policy": "fasttree"}, False, ""),
        ("auto", "cpu", None, (32, 8), 128, {}, False, ""),
        ("host", "cuda", (9, 0), (32, 8), 128, {}, False, ""),
        ("device", "cuda", (8, 0), (8, 8), 64, {}, True, ""),
        ("device", "cpu", None, (4, 2), 64, {}, True, ""),
        (
            "device",
            "cuda",
            (9, 0),
            (32, 8),
            128,
            {"verify": True},
            False,
            "DEFT_VERIFY checks plans",
        ),
        (
            "device",
            "cuda",
            (9, 0),
            (32, 8),
            128,
            {"policy": "fasttree"},
            False,
            "knows the policy auto only",
        ),
    ],
)
def test_which_planner_an_adapter_of_both_uses(
    planner: str, device: str, capability: Any, heads: tuple[int, int], head_dim: int,
    changed: dict[str, Any], expected: bool, said: str, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    settings = Settings(planner=planner, **changed)
    where = torch.device(device)
    assert selects_device_planner(settings, where, (*heads, head_dim)) is expected
    assert said in caplog.text
    assert bool(said) == bool(caplog.text)


@pytest.mark.parametrize("planner", ["auto", "host", "device"])
def test_the_policy_alone_decides_where_an_adapter_has_one_planner_a_policy(planner: str) -> None:
    chosen = {
        name for name in POLICY_NAMES
        if policy_selects_device_planner(Settings(planner=planner, policy=name))
    }  # fmt: skip
    assert chosen == {"auto"}


def test_the_log_says_if_the_device_planner_holds_fewer_requests(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING, logger="deft_backend"):
        assert planned_on_device(largest_batch()) == largest_batch()
        assert not caplog.records
        assert planned_on_device(4096) == largest_batch()
    assert "DEFT_MAX_BATCH asks for batches of up to 4096 requests, but the device" in caplog.text
