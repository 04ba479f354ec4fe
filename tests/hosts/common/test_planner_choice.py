"""The choice of the planner, and the number of requests that the device planner holds."""

import logging
from itertools import product

import pytest

from deft_backend.hosts.common.limits import refused
from deft_backend.hosts.common.planner_choice import (
    SGLANG_ADAPTER,
    VLLM_ADAPTER,
    planned_on_device,
    selects_device_planner,
    untried,
)
from deft_backend.planner.on_device import largest_batch
from deft_backend.policies import POLICY_NAMES
from deft_backend.settings.config import PLANNERS, Settings

HOPPER, AMPERE, CPU = (9, 0), (8, 0), None
SGLANG, VLLM = SGLANG_ADAPTER, VLLM_ADAPTER


@pytest.mark.parametrize(
    ("adapter", "planner", "capability", "changed", "expected", "said"),
    [
        (SGLANG, "auto", HOPPER, {}, True, ""),
        (SGLANG, "auto", CPU, {}, False, ""),
        (SGLANG, "auto", HOPPER, {"verify": True}, False, ""),
        (SGLANG, "device", AMPERE, {}, True, ""),
        (SGLANG, "device", CPU, {}, True, ""),
        (SGLANG, "device", HOPPER, {"verify": True}, False, "DEFT_VERIFY checks plans of the host"),
        (VLLM, "auto", AMPERE, {}, True, ""),
        (VLLM, "auto", CPU, {}, True, ""),
        (VLLM, "auto", HOPPER, {"verify": True}, True, ""),
        (VLLM, "auto", CPU, {"policy": "deft-flatten"}, True, ""),
        (VLLM, "host", CPU, {}, False, ""),
        (VLLM, "host", HOPPER, {}, True, "DEFT_PLANNER=host needs a host that waits for the GPU"),
    ],
)
def test_one_rule_for_both_adapters(adapter, planner, capability, changed, expected, said, caplog):
    settings = Settings(planner=planner, **changed)
    assert selects_device_planner(settings, adapter, capability) is expected
    assert said in caplog.text
    assert bool(said) == bool(caplog.text)


def test_both_adapters_plan_on_the_device_on_hopper_if_that_takes_microseconds():
    for adapter in (SGLANG, VLLM):
        for planner, policy in product(PLANNERS, POLICY_NAMES):
            settings = Settings(planner=planner, policy=policy)
            planned = selects_device_planner(settings, adapter, HOPPER)
            quick = policy != "deft-flatten" or planner == "device"
            assert planned == ((planner != "host" and quick) or not adapter.waits)


def test_verification_that_no_gpu_has_tried_needs_its_planner_named():
    flatten = Settings(policy="deft-flatten")
    assert "DEFT_PLANNER=device tries it" in str(untried(flatten, HOPPER, 4))
    assert untried(flatten, HOPPER, 1) is None
    assert untried(flatten, CPU, 4) is None
    assert untried(Settings(policy="deft-flatten", planner="device"), HOPPER, 4) is None
    assert untried(Settings(policy="fasttree"), HOPPER, 4) is None


def test_the_log_says_if_the_device_planner_holds_fewer_requests(caplog):
    with caplog.at_level(logging.WARNING, logger="deft_backend"):
        assert planned_on_device(largest_batch()) == largest_batch()
        assert not caplog.records
        assert planned_on_device(4096) == largest_batch()
    assert "DEFT_MAX_BATCH asks for batches of up to 4096 requests, but the device" in caplog.text


@pytest.mark.parametrize(
    ("requests", "planned", "reason"),
    [
        (2, 8, None), (4, 8, None), (3, 3, None), (1, 8, "batch smaller than DEFT_MIN_BATCH=2"),
        (5, 8, "batch larger than DEFT_MAX_BATCH=4"),
        (4, 3, "batch larger than the 3 requests that a plan holds"),
    ],
)  # fmt: skip
def test_the_batches_that_tree_attention_decodes(requests, planned, reason):
    assert refused(requests, Settings(min_batch=2, max_batch=4), planned) == reason
