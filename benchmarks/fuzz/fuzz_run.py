"""Start the fuzzer's processes, watch them, and merge what they report."""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from benchmarks.fuzz.fuzz_process import Job, work

STUCK_SECONDS = 240.0
"""A process that reports nothing for so long hangs; a first chunk compiles kernels."""


@dataclass(frozen=True)
class Fuzz:
    """A run of the fuzzer.

    Attributes
    ----------
    what : tuple of str
        ``plans``, ``attention``, or both, one after the other.
    seconds : float
        For each of them.
    plans : int
        Plans after which each of them ends; 0: none.
    processes : int
    settings : int
        Settings that each process takes.
    seed : int
    device : str
    dtypes : tuple of str
        Of attention.
    """

    what: tuple[str, ...]
    seconds: float
    plans: int
    processes: int
    settings: int
    seed: int
    device: str
    dtypes: tuple[str, ...]


def run(fuzz: Fuzz, say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Run the fuzzer; returns one row for plans and one for attention.

    A process that dies or hangs counts as a failure of the seeds that it ran.
    """
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for what in fuzz.what:
            begin = time.time()
            jobs = _jobs(fuzz, what, Path(folder))
            deaths = _watch(jobs, say)
            row = merged(jobs)
            row["failures"] += deaths
            rows.append({"what": what, "seconds": round(time.time() - begin, 1), **row})
    return rows


def _jobs(fuzz: Fuzz, what: str, folder: Path) -> list[Job]:
    return [
        Job(
            what, number, fuzz.processes, time.time() + fuzz.seconds,
            -(-fuzz.plans // fuzz.processes), fuzz.seed, fuzz.settings, folder, fuzz.device,
            fuzz.dtypes,
        )
        for number in range(fuzz.processes)
    ]  # fmt: skip


def _watch(jobs: list[Job], say: Callable[[str], None]) -> list[dict[str, Any]]:
    """Wait for the processes; returns a failure for each that died or hung."""
    context = multiprocessing.get_context("spawn")
    running = {job: context.Process(target=work, args=(job,)) for job in jobs}
    for process in running.values():
        process.start()
    failures = []
    said = begin = time.time()
    while running:
        time.sleep(0.2)
        for job, process in list(running.items()):
            why = _ended(job, process, begin)
            if why is not None:
                del running[job]
                if why:
                    failures.append(_blamed(job, why))
        if time.time() - said > 15:
            said = time.time()
            row = merged(jobs)
            say(f"{row['plans']} plans, {len(row['failures']) + len(failures)} failures")
    return failures


def _ended(job: Job, process: BaseProcess, begin: float) -> str | None:
    """None while a process runs; then why it failed, or nothing."""
    if process.is_alive():
        try:
            last = job.now.stat().st_mtime
        except OSError:
            last = begin
        if time.time() - last < STUCK_SECONDS:
            return None
        process.kill()
        process.join()
        return f"the process hung for {STUCK_SECONDS:.0f} s"
    process.join()
    return f"the process ended with {process.exitcode}" if process.exitcode else ""


def _blamed(job: Job, why: str) -> dict[str, Any]:
    try:
        chunk = json.loads(job.now.read_text())
    except OSError:
        return {"what": job.what, "why": f"{why}, before its first chunk"}
    first, stop = chunk.pop("seeds")
    return {**chunk, "seed": first, "seeds": stop - first, "why": why}


def merged(jobs: list[Job]) -> dict[str, Any]:
    """The sum of the processes' reports."""
    total: dict[str, Any] = {
        "plans": 0, "compared": 0, "same": 0, "ties": 0, "skipped": 0, "attention": 0,
        "by_planner": Counter(), "kinds": Counter(), "largest_error": {}, "first_ties": [],
        "failures": [],
    }  # fmt: skip
    for job in jobs:
        try:
            report = json.loads(job.report.read_text())
        except OSError:
            continue
        for name in ("plans", "compared", "same", "ties", "skipped", "attention"):
            total[name] += report[name]
        for name in ("by_planner", "kinds"):
            total[name].update(report[name])
        for dtype, error in report["largest_error"].items():
            total["largest_error"][dtype] = max(error, total["largest_error"].get(dtype, 0.0))
        total["first_ties"] += report["first_ties"]
        total["failures"] += report["failures"]
    return total
