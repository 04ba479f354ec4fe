"""Pytest plugin: write what a run gave, with the servers' decode steps, to a JSON file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from integration_tests.common.steps import StepTotal


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--result", type=Path, help="Write counts of tests and steps to this file.")


class _Result:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._failed: set[str] = set()
        self._passed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)
        elif report.when == "call" and report.passed:
            self._passed.add(report.nodeid)

    # The last of all: servers of the session end after its last test.
    def pytest_unconfigure(self) -> None:
        content = {
            "passed": len(self._passed - self._failed),
            "failed": len(self._failed),
            "tree_steps": StepTotal.tree_steps,
            "device": StepTotal.device,
        }
        self._path.write_text(json.dumps(content))


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--result")
    if path is not None:
        config.pluginmanager.register(_Result(path))
