"""One process of the fuzzer: chunk after chunk until its time is over."""

from __future__ import annotations

import itertools
import json
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.fuzz.attention_cases import AttentionFuzzer
from benchmarks.fuzz.attention_settings import PLANNERS, AttentionSetting, attention_settings
from benchmarks.fuzz.outcome import Failure
from benchmarks.fuzz.plan_cases import PlanFuzzer
from benchmarks.fuzz.plan_settings import PlanSetting, plan_settings
from deft_backend.files.user_files import replace_file

WHATS = ("plans", "attention")
SEEDS_OF_A_WORKER = 1 << 40


@dataclass(frozen=True)
class Job:
    """What a process does.

    Attributes
    ----------
    what : str
        One of :data:`WHATS`.
    number, of : int
        Which process, and of how many.
    until : float
        When it ends, by the machine's clock (``time.time``).
    most : int
        Plans after which it ends; 0: none.
    seed : int
        Of the whole run.
    settings : int
        How many settings the process takes; on a GPU each is compiled.
    folder : Path
        Where it writes its report.
    device : str
    dtypes : tuple of str
    """

    what: str
    number: int
    of: int
    until: float
    most: int
    seed: int
    settings: int
    folder: Path
    device: str
    dtypes: tuple[str, ...]

    @property
    def large(self) -> bool:
        """Whether batches are as large as a GPU runs fast."""
        return self.device == "cuda"

    @property
    def report(self) -> Path:
        """The file of the process's counts so far."""
        return self.folder / f"{self.what}-{self.number}.json"

    @property
    def now(self) -> Path:
        """The file of the chunk that runs: what to blame if the process dies."""
        return self.folder / f"{self.what}-{self.number}.now.json"


@dataclass
class Report:
    """Counts of a process; :attr:`failures` hold all that a case needs.

    Attributes
    ----------
    plans : int
    compared, same : int
        Batches that both planners planned, and those with the same items.
    ties : int
        Batches with other items that cost the same.
    first_ties : list
        Setting and seed of the first of them.
    skipped : int
        Plans without a result, because other processes had taken the GPU's memory.
    attention : int
        Plans with attention.
    by_planner : dict
        Plans with attention by planner or policy.
    kinds : dict
        Plans of each kind; a plan may be of several.
    largest_error : dict
        By dtype.
    """

    plans: int = 0
    compared: int = 0
    same: int = 0
    ties: int = 0
    skipped: int = 0
    attention: int = 0
    by_planner: Counter[str] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    first_ties: list[dict[str, Any]] = field(default_factory=list)
    largest_error: dict[str, float] = field(default_factory=dict)
    failures: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON."""
        return dict(vars(self))

    def add_failures(self, job: Job, setting: Any, found: Sequence[Failure]) -> None:
        """Keep failing seeds with their setting."""
        self.failures += [
            {"what": job.what, "large": job.large, "setting": asdict(setting), **failure._asdict()}
            for failure in found
        ]


def work(job: Job) -> None:
    """Run chunks until the time or the number of plans is reached, and report after each."""
    torch.set_num_threads(1)
    if job.device == "cuda":
        gpus = torch.cuda.device_count()
        torch.cuda.set_device(job.number % gpus)
        # CUDA itself takes about half a gigabyte of each process.
        torch.cuda.set_per_process_memory_fraction(min(0.5, 0.75 * gpus / job.of))
    report = Report()
    chunks = _plan_chunks if job.what == "plans" else _attention_chunks
    for _ in chunks(job, report):
        replace_file(job.report, json.dumps(report.to_dict()))
        if time.time() > job.until or (job.most and report.plans >= job.most):
            break


def my_settings(job: Job) -> list[PlanSetting] | list[AttentionSetting]:
    """The settings of a process; together the processes take as many different ones as they can."""
    every: Any = plan_settings()
    if job.what == "attention":
        every = attention_settings(job.dtypes, large=job.large)
    first = job.number + job.seed
    return [every[(first + n * job.of) % len(every)] for n in range(job.settings)]


def _seeds(job: Job, size: int) -> Iterator[range]:
    first = job.seed * 1_000_003 + job.number * SEEDS_OF_A_WORKER
    for chunk in itertools.count():
        yield range(first + chunk * size, first + (chunk + 1) * size)


def _plan_chunks(job: Job, report: Report) -> Iterator[None]:
    device = torch.device(job.device)
    on_gpu = device.type == "cuda"
    settings: Any = my_settings(job)
    seeds = _seeds(job, 64 if on_gpu else 2)
    fuzzers: dict[Any, PlanFuzzer] = {}
    for setting in itertools.cycle(settings):
        if setting not in fuzzers:
            fuzzers[setting] = PlanFuzzer(setting, device, large=on_gpu)
        chunk = next(seeds)
        _begin(job, setting, "device", chunk)
        counts = fuzzers[setting].run(chunk)
        report.plans += counts.plans
        report.kinds += counts.kinds
        report.compared += counts.compared
        report.same += counts.same
        report.ties += len(counts.ties)
        if len(report.first_ties) < 20:
            report.first_ties += [
                {"setting": asdict(setting), "seed": seed} for seed in counts.ties
            ]
        report.add_failures(job, setting, counts.failures)
        yield


def _attention_chunks(job: Job, report: Report) -> Iterator[None]:
    device = torch.device(job.device)
    on_gpu = device.type == "cuda"
    settings: Any = my_settings(job)
    seeds = _seeds(job, 64 if on_gpu else 2)
    fuzzers: dict[Any, AttentionFuzzer] = {}
    for setting, planner in _turns(settings):
        if setting not in fuzzers:
            fuzzers[setting] = AttentionFuzzer(setting, device, large=on_gpu)
        chunk = next(seeds)
        _begin(job, setting, planner, chunk)
        try:
            found = fuzzers[setting].run(chunk, planner)
        except torch.OutOfMemoryError:
            del fuzzers[setting]
            torch.cuda.empty_cache()
            report.skipped += len(chunk)
            yield
            continue
        report.plans += len(chunk)
        report.attention += len(chunk)
        report.by_planner[planner] += len(chunk)
        report.kinds += found.kinds
        report.largest_error[setting.dtype] = max(
            found.largest_error, report.largest_error.get(setting.dtype, 0.0)
        )
        report.add_failures(job, setting, found.failures)
        yield


def _turns(settings: list[AttentionSetting]) -> Iterator[tuple[AttentionSetting, str]]:
    """Each round takes every setting, and each time another planner."""
    for turn in itertools.count():
        for number, setting in enumerate(settings):
            yield setting, PLANNERS[(turn + number) % len(PLANNERS)]


def _begin(job: Job, setting: Any, planner: str, chunk: range) -> None:
    content = {
        "what": job.what, "large": job.large, "setting": asdict(setting), "planner": planner,
        "seeds": [chunk.start, chunk.stop],
    }  # fmt: skip
    replace_file(job.now, json.dumps(content))
