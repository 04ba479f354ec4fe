"""A small selection of the faults, for the tests of either host."""

from integration_tests.common.server import MODEL
from integration_tests.faults.run import Harness

SELECTED = {
    "sglang": {"files", "poison", "planner", "launch", "sigkill"},
    "vllm": {"files", "poison", "planner", "sigkill"},
}
"""Faults that share one server; `python -m integration_tests.faults` injects all of them."""


def check_faults(host, folder):
    """Inject the selected faults into a server, and expect what docs/reliability.md promises."""
    rows = Harness(host, folder, MODEL, 1, 0, print).run(SELECTED[host])
    assert {row["fault"] for row in rows} == SELECTED[host]
    assert [row for row in rows if not row["ok"]] == []
