"""Pytest plugin: write a run's result, with the servers' decode steps, to a JSON file."""

import json
from pathlib import Path

import pytest

_KEY = "deft_steps"


class StepTotal:
    """Decode steps through tree attention of all servers so far, and the servers' device."""

    tree_steps = 0
    device = "cpu"


def pytest_addoption(parser):
    parser.addoption("--result", type=Path, help="Write counts of tests and steps to this file.")


class _Result:
    """Counts of the reporting process; counts of servers come from the processes that run tests."""

    def __init__(self, path):
        self._path = path
        self._failed = set()
        self._passed = set()
        self._tree_steps = 0
        self._device = StepTotal.device

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self._failed.add(report.nodeid)
        elif report.when == "call" and report.passed:
            self._passed.add(report.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        """A process of pytest-xdist has ended."""
        steps = getattr(node, "workeroutput", {}).get(_KEY)
        if steps is not None:
            self._tree_steps += steps["tree_steps"]
            self._device = steps["device"]

    # Run this last: servers of the session end after its last test.
    def pytest_unconfigure(self):
        content = {
            "passed": len(self._passed - self._failed),
            "failed": len(self._failed),
            "tree_steps": self._tree_steps + StepTotal.tree_steps,
            "device": self._device if self._tree_steps else StepTotal.device,
        }
        self._path.write_text(json.dumps(content))


def pytest_configure(config):
    path = config.getoption("--result")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Result(path))


def pytest_sessionfinish(session):
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output[_KEY] = {"tree_steps": StepTotal.tree_steps, "device": StepTotal.device}
