"""Run the integration tests of an environment's host and read their result."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

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
    variables = dict(os.environ) if in_window else {**os.environ, "DEFT_UNTESTED_HOST": "1"}
    with tempfile.TemporaryDirectory(prefix="host-matrix-") as folder:
        result = Path(folder) / "result.json"
        shared = ("-n", str(processes), "--dist", "loadgroup") if processes > 1 else ()
        command = [
            *(python_of(environment), "-m", "pytest", "-q"),
            *("-p", "integration_tests.common.result", "--result", result),
            *(*_MARKS[suite], *shared, "integration_tests"),
        ]
        done = subprocess.run(command, cwd=ROOT, env=variables, check=False)
        if not result.exists():
            return Outcome(done.returncode or 1, 0, 0, 0, "")
        return Outcome(done.returncode, **json.loads(result.read_text()))
