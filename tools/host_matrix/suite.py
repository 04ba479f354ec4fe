"""Run the integration tests of an environment's host and read their result."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tools.host_matrix.environment import ROOT, python_of

SUITES = ("smoke", "common", "full")
"""``common`` is what ``make test`` runs: all but the tests with the mark ``rare``."""

_MARKS = {"smoke": ("-m", "smoke"), "common": ("-m", "not rare"), "full": ()}

PROCESSES = 2
"""Each takes about 7 GB of memory: two servers."""


@dataclass(frozen=True)
class Outcome:
    """The result of a suite's run."""

    exit_code: int  # Pytest's; 0 if every test passed
    passed: int
    failed: int  # with the tests that could not be set up
    tree_steps: int  # decode steps through tree attention, summed over the servers
    device: str  # of those servers: ``cpu``, or the GPU's name


def run_suite(
    suite: str, environment: Path, *, in_window: bool = True, processes: int = PROCESSES
) -> Outcome:
    """Run a suite in an environment; pytest's output goes to the terminal.

    Outside the window of supported versions, ``DEFT_UNTESTED_HOST=1`` is set. The `processes` share
    the groups of tests; each runs a server with the host's own backend and a server with ours.
    """
    untested = {} if in_window else {"DEFT_UNTESTED_HOST": "1"}
    with tempfile.TemporaryDirectory(prefix="host-matrix-") as folder:
        report, steps = Path(folder) / "report.xml", Path(folder) / "steps.jsonl"
        shared = ("-n", str(processes), "--dist", "loadgroup") if processes > 1 else ()
        tests = ("--junitxml", report, *_MARKS[suite], *shared, "integration_tests")
        done = subprocess.run(
            [python_of(environment), "-m", "pytest", "-q", *tests],
            cwd=ROOT,
            env={**os.environ, **untested, "INTEGRATION_STEPS": str(steps)},
            check=False,
        )
        return outcome_of(done.returncode, report, steps)


def outcome_of(code: int, report: Path, steps: Path) -> Outcome:
    """From pytest's report in JUnit's format, and a line of each server."""
    cases = ElementTree.parse(report).findall(".//testcase") if report.exists() else []
    failed = sum({each.tag for each in case} & {"failure", "error"} != set() for case in cases)
    skipped = sum(case.find("skipped") is not None for case in cases)
    lines = steps.read_text().splitlines() if steps.exists() else []
    servers = [json.loads(line) for line in lines]
    device = servers[-1][1] if servers else ""
    passed, tree_steps = len(cases) - failed - skipped, sum(server[0] for server in servers)
    return Outcome(code or int(not cases), passed, failed, tree_steps, device)
