"""A failure closes tree attention once, warnings are logged once, and a division reads well."""

from deft_backend.hosts.common.latches import FailureLatch, OnceLog
from deft_backend.hosts.common.limits import Division


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


def test_a_warning_is_logged_once_for_each_kind(caplog):
    log = OnceLog()
    for message in ("5 rows", "6 rows"):
        log.warn(message, kind="rows")
        log.warn("a line")
    assert caplog.messages == ["deft: 5 rows", "deft: a line"]
    OnceLog().warn("a line")  # another latch
    assert caplog.messages[2:] == ["deft: a line"]


def test_a_division_gives_the_commonest_reason_first():
    host = {"a": "cross attention", "b": "a sliding window", "c": "a sliding window"}
    assert Division({"d": None}, {}).text() is None
    assert Division({"d": None}, host).text() == (
        "1 of 4 layers decode through tree attention; 2 with a sliding window, 1 with cross "
        "attention through the host's kernels"
    )
