"""Run architectures of the zoo: tree attention answers, and the host's own backend checks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from benchmarks.zoo.architecture_run import Run
from benchmarks.zoo.architectures import ARCHITECTURES
from benchmarks.zoo.place import Place
from benchmarks.zoo.processes import TIME_UP, end_process, start, wait_for
from deft_backend.tools.servers.driver_stub import num_gpus


def run(
    names: Sequence[str], place: Place, folder: Path, at_once: int, seconds: float
) -> Iterator[dict[str, Any]]:
    """A row for each architecture, as soon as it is there.

    Parameters
    ----------
    names : sequence of str
    place : Place
    folder : Path
        For models, logs and answers.
    at_once : int
        Architectures that run at the same time; each has two engines.
    seconds : float
        The whole run ends after this time; architectures that have not ended get a row with a note.
    """
    gpus = max(1, num_gpus()) if place.gpu else 1
    runs = [
        Run(name, ARCHITECTURES[name], place, folder / name, at % gpus)
        for at, name in enumerate(names)
    ]
    end = time.monotonic() + seconds
    if place.in_one_process:
        yield from _in_one_process(runs, place, folder, end)
        return
    with ThreadPoolExecutor(at_once) as threads:
        running = [threads.submit(_beside_each_other, run, end) for run in runs]
        for done in as_completed(running):
            yield done.result()


def _beside_each_other(run: Run, end: float) -> dict[str, Any]:
    """Both engines in processes of their own; on the CPU one after the other, to save memory."""
    jobs = run.jobs(end)
    groups = [list(jobs.values())] if run.place.gpu else [[job] for job in jobs.values()]
    for group in groups:
        started = [start([job], run.place, run.folder, run.gpu_index) for job in group]
        note = wait_for(started, end)
        if note:
            return run.row(note if note == TIME_UP else "")
    return run.row()


def _in_one_process(
    runs: Sequence[Run], place: Place, folder: Path, end: float
) -> Iterator[dict[str, Any]]:
    """All engines one after the other: importing the host takes longer than a small model."""
    jobs = [job for run in runs for job in run.jobs(end).values()]
    process = start(jobs, place, folder)
    waiting = list(runs)
    try:
        while waiting and process.poll() is None and time.monotonic() < end:
            begun = [run for run in waiting if (run.folder / "deft.log").is_file()]
            for run in [run for run in waiting if run.done or run in begun[:-1]]:
                waiting.remove(run)
                yield run.row()
            time.sleep(0.5)
        note = TIME_UP if process.poll() is None else ""
    finally:
        end_process(process)
    for run in waiting:
        yield run.row("" if run.done else note)
