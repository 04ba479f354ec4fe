"""What an adapter decides without its host: batches, failures that last, lines, divisions."""

import logging

import pytest

from deft_backend.hosts.common.latches import FailureLatch
from deft_backend.hosts.common.limits import planned_on_device, refused
from deft_backend.planner.on_device import largest_batch
from deft_backend.settings.config import Settings


def test_the_log_says_if_the_device_planner_holds_fewer_requests(caplog):
    with caplog.at_level(logging.WARNING, logger="deft_backend"):
        assert planned_on_device(largest_batch(), 1) == largest_batch()
        assert not caplog.records
        assert planned_on_device(4096, 1) == largest_batch()
    assert "DEFT_MAX_BATCH asks for batches of up to 4096 requests, but the device" in caplog.text


@pytest.mark.parametrize(
    ("requests", "planned", "reason"),
    [
        (2, 8, None),
        (4, 8, None),
        (3, 3, None),
        (1, 8, "batch smaller than DEFT_MIN_BATCH=2"),
        (5, 8, "batch larger than DEFT_MAX_BATCH=4"),
        (4, 3, "batch larger than the 3 requests that a plan holds"),
    ],
)
def test_the_batches_that_tree_attention_decodes(requests, planned, reason):
    assert refused(requests, Settings(min_batch=2, max_batch=4), planned) == reason


def test_the_first_failure_is_logged_and_kept(caplog):
    latch = FailureLatch()
    assert latch.reason is None
    latch.kernel_failed(RuntimeError("out of resources"))
    latch.planning_failed(ValueError("later"))
    assert latch.reason == "kernel failed"
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [
        "deft: a kernel failed (RuntimeError('out of resources')). The host's kernel decodes from "
        "now on; restart the server to use tree attention again."
    ]
