"""Run a module of this package in a process of its own, whose GPU memory is freed when it ends.

A run's own process lives as long as the measured servers. A CUDA context and the caching
allocator's gigabytes in it would reduce the KV cache of each server.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]
"""The folder in which other processes find this package, which is not installed."""

_MOST_STDERR = 800
"""Characters of a failed process's output in the error: the end of its traceback."""


class ProcessFailed(RuntimeError):
    """The process ended with an error; the message says how, and ends with what it wrote."""


def run_module(module: str, *arguments: str) -> str:
    """Run ``python -m module`` with these arguments; returns what it printed.

    Raises
    ------
    ProcessFailed
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=CHECKOUT, capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    if done.returncode:
        raise ProcessFailed(
            f"{module} ended with {done.returncode}: "
            f"{done.stderr.strip()[-_MOST_STDERR:] or '(nothing)'}"
        )
    return done.stdout
