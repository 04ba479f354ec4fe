"""Start the zoo's processes, wait for them, and end them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.zoo.place import ROOT, Place

TIME_UP = "time was up"

_started: list[subprocess.Popen[bytes]] = []


def start(
    jobs: Sequence[Path], place: Place, folder: Path, gpu_index: int = 0
) -> subprocess.Popen[bytes]:
    """Start a process that does the jobs, one after the other."""
    environment = {**place.environment(gpu_index), "DEFT_CACHE_DIR": str(folder / "cache")}
    with (folder / "worker.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.zoo.engine_process", *map(str, jobs)], cwd=ROOT,
            env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    _started.append(process)
    return process


def wait_for(started: Sequence[subprocess.Popen[bytes]], end: float) -> str:
    """Wait for processes; end all of them if one fails or time is up. Returns what was wrong."""
    try:
        while any(process.poll() is None for process in started):
            if any(process.poll() for process in started):
                return "failed"
            if time.monotonic() > end:
                return TIME_UP
            time.sleep(0.2)
        return "failed" if any(process.returncode for process in started) else ""
    finally:
        for process in started:
            end_process(process)


def end_all() -> None:
    """End every process that this one has started: they do not end with it."""
    for process in _started:
        end_process(process)


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children: they are a session of their own."""
    if process.poll() is None:
        os.killpg(process.pid, 15)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
