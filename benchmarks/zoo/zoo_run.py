"""Run architectures of the zoo: tree attention answers, and the host's own backend checks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.zoo.architectures import ARCHITECTURES, VOCABULARY, Architecture
from benchmarks.zoo.engine_process import Job
from deft_backend.installed import installed_version
from deft_backend.servers.command import BACKEND_NAMES, free_port
from deft_backend.servers.driver_stub import ensure_driver_stub, has_nvidia_driver, num_gpus

KEYS = (
    "host", "version", "architecture", "query_heads", "kv_heads", "head_dim", "kv_dtype",
    "layers_tree", "layers_host", "tokens_checked", "tokens_wrong", "ties",
)  # fmt: skip
"""Keys of a row, besides ``device`` and ``note``."""

_ROOT = Path(__file__).parents[2]

_DIVIDED = re.compile(r"deft: (\d+) of \d+ layers decode through tree attention")
_LEFT = re.compile(r"deft: .*(?:host's own|not supported|failed|alone|decode through the host's).*")
_ERROR = re.compile(r"(?:^|[ (])[A-Za-z.]*(?:Error|Exception)\b.*:")
_WORKS = re.compile(r"deft: decode (?:of \d+ layers )?goes through tree attention")


@dataclass(frozen=True)
class Place:
    """Where the engines run.

    Attributes
    ----------
    host : str
        "sglang" or "vllm".
    gpu : bool
    answers : str, optional
        The backend that answers; None: the plugin. With another backend of the host, the rows show
        what rounding alone changes.
    share : float
        Part of the GPU's memory for one engine of vLLM.
    """

    host: str
    gpu: bool
    answers: str | None = None
    share: float = 0.06

    @property
    def backend(self) -> str:
        """The host's name for the backend that answers."""
        return self.answers or BACKEND_NAMES[self.host]

    @property
    def in_one_process(self) -> bool:
        """Whether one process can make engine after engine."""
        return self.host == "vllm" and not self.gpu

    @property
    def requests(self) -> dict[str, int]:
        """Arguments of the requests: short ones on the CPU, whose kernels are interpreted."""
        if self.gpu:
            return {"ids": VOCABULARY, "prefix": 1500, "branch": 300, "leaves": 12, "tokens": 48}
        return {"ids": VOCABULARY, "prefix": 90, "branch": 30, "leaves": 2, "tokens": 8}

    def options(self) -> dict[str, Any]:
        """Arguments of the engine, which has a port of its own."""
        if self.host == "sglang":
            port = {"port": free_port()}
            if not self.gpu:
                return {
                    **port, "device": "cpu", "max_total_tokens": 16384, "max_running_requests": 16,
                }  # fmt: skip
            return {
                **port,
                "mem_fraction_static": 0.8, "max_total_tokens": 100_000,
                "max_running_requests": 64, "max_mamba_cache_size": 192,
                "cuda_graph_bs_decode": [1, 8, 16, 32], "cuda_graph_backend_prefill": "disabled",
            }  # fmt: skip
        common: dict[str, Any] = {"max_model_len": 4096, "max_num_seqs": 32}
        if not self.gpu:
            return {**common, "enforce_eager": True}
        return {**common, "gpu_memory_utilization": self.share}

    def environment(self, gpu_index: int = 0) -> dict[str, str]:
        """The engine's environment, on one of the GPUs."""
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        found = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        found |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        found |= {"DEFT_MIN_SAVED_MS": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
        if self.gpu:
            shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            found["CUDA_VISIBLE_DEVICES"] = shown[gpu_index] if shown[0] else str(gpu_index)
            return found
        found |= {"TRITON_INTERPRET": "1", "SGLANG_USE_CPU_ENGINE": "1"}
        found |= {"VLLM_CPU_KVCACHE_SPACE": "1", "DEFT_MIN_SHARE": "1"}
        found |= {"DEFT_MIN_SHARED_TOKENS": "0", "DEFT_PLANNER": "host"}  # quick to interpret
        if self.host == "sglang" and not has_nvidia_driver():
            paths = [str(ensure_driver_stub()), os.environ.get("LD_LIBRARY_PATH", "")]
            found["LD_LIBRARY_PATH"] = os.pathsep.join(path for path in paths if path)
        return found


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


@dataclass(frozen=True)
class Run:
    """One architecture at one place: its files, its jobs and its row."""

    name: str
    architecture: Architecture
    place: Place
    folder: Path
    gpu_index: int = 0

    def jobs(self, end: float) -> dict[str, Path]:
        """Write the model and the jobs of both engines; their files, by role."""
        model = self.folder / "model"
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text(json.dumps(self.architecture.config))
        for old in ("answers.json", "verdict.json", "deft.log", "host.log"):
            (self.folder / old).unlink(missing_ok=True)
        files = {}
        for role, backend in (("deft", self.place.backend), ("host", None)):
            job = Job(
                host=self.place.host, backend=backend, model=str(model), dtype=self.dtype,
                options=self.place.options(), shape=self.place.requests,
                answers=str(self.folder / "answers.json"),
                checked=None if role == "deft" else str(self.folder / "verdict.json"),
                log=str(self.folder / f"{role}.log"), wait=max(1.0, end - time.monotonic()),
            )  # fmt: skip
            files[role] = self.folder / f"{role}.job.json"
            job.save(files[role])
        return files

    @property
    def dtype(self) -> str:
        return "bfloat16" if self.place.gpu else self.architecture.dtype

    @property
    def done(self) -> bool:
        return (self.folder / "verdict.json").is_file()

    def row(self, note: str = "") -> dict[str, Any]:
        """The result, or a row with a note that tells why there is none."""
        query, kv, dim = self.architecture.heads
        layers = self.architecture.layers
        row: dict[str, Any] = {
            "host": self.place.host, "version": _version(self.place.host),
            "architecture": self.name, "query_heads": query, "kv_heads": kv, "head_dim": dim,
            "kv_dtype": self.dtype, "layers_tree": 0, "layers_host": layers, "tokens_checked": 0,
            "tokens_wrong": 0, "ties": 0, "device": "gpu" if self.place.gpu else "cpu",
        }  # fmt: skip
        if self.place.answers is not None:
            row["backend"] = self.place.answers
        if not self.done:
            return {**row, "note": (note or self._last_error())[:300]}
        verdict = json.loads((self.folder / "verdict.json").read_text())
        tree = layers_of_tree((self.folder / "deft.log").read_text(errors="replace"), layers)
        row |= {
            "layers_tree": tree, "layers_host": layers - tree,
            "tokens_checked": verdict["tokens"], "tokens_wrong": verdict["wrong"],
            "ties": verdict["ties"],
        }  # fmt: skip
        if verdict["first_wrong"]:
            row["note"] = "; ".join(verdict["first_wrong"][:3])
        return row

    def _last_error(self) -> str:
        for role in ("deft", "host"):
            log = self.folder / f"{role}.log"
            lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
            errors = [line.strip() for line in lines if _ERROR.search(line)]
            if errors:
                return f"{role}: {errors[-1]}"
        return "the engines left no result and no error"


def _beside_each_other(run: Run, end: float) -> dict[str, Any]:
    """Both engines in processes of their own; on the CPU one after the other, to save memory."""
    jobs = run.jobs(end)
    groups = [list(jobs.values())] if run.place.gpu else [[job] for job in jobs.values()]
    for group in groups:
        started = [_start([job], run.place, run.folder, run.gpu_index) for job in group]
        note = _wait(started, end)
        if note:
            return run.row(note if note == TIME_UP else "")
    return run.row()


def _in_one_process(
    runs: Sequence[Run], place: Place, folder: Path, end: float
) -> Iterator[dict[str, Any]]:
    """All engines one after the other: importing the host takes longer than a small model."""
    jobs = [job for run in runs for job in run.jobs(end).values()]
    process = _start(jobs, place, folder)
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
        _end(process)
    for run in waiting:
        yield run.row("" if run.done else note)


def layers_of_tree(log: str, layers: int) -> int:
    """How many of a model's layers tree attention decoded, from the log of its engine."""
    if not _WORKS.search(log) or _LEFT.search(_DIVIDED.sub("", log).replace("host's kernels", "")):
        return 0
    divided = _DIVIDED.search(log)
    return layers if divided is None else int(divided.group(1))


def _start(
    jobs: Sequence[Path], place: Place, folder: Path, gpu_index: int = 0
) -> subprocess.Popen[bytes]:
    environment = {**place.environment(gpu_index), "DEFT_STATE_DIR": str(folder / "state")}
    with (folder / "worker.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.zoo.engine_process", *map(str, jobs)], cwd=_ROOT,
            env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    _started.append(process)
    return process


TIME_UP = "time was up"


def _wait(started: Sequence[subprocess.Popen[bytes]], end: float) -> str:
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
            _end(process)


_started: list[subprocess.Popen[bytes]] = []


def end_all() -> None:
    """End every process that this one has started: they do not end with it."""
    for process in _started:
        _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children: they are a session of their own."""
    if process.poll() is None:
        os.killpg(process.pid, 15)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)


def _version(host: str) -> str:
    for package in (host, f"{host}-cpu"):
        found = installed_version(package)
        if found is not None:
            return found
    return "unknown"
