"""Run architectures of the zoo: tree attention answers, and the host's own backend checks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.zoo.architectures import ARCHITECTURES, VOCABULARY, Architecture
from benchmarks.zoo.worker import Job
from deft_backend.installed import installed_version
from deft_backend.servers.command import BACKEND_NAMES
from deft_backend.servers.driver_stub import ensure_driver_stub, has_nvidia_driver

KEYS = (
    "host", "version", "architecture", "query_heads", "kv_heads", "head_dim", "kv_dtype",
    "layers_tree", "layers_host", "tokens_checked", "tokens_wrong", "ties",
)  # fmt: skip
"""Keys of a row, besides ``device`` and ``note``."""

_ROOT = Path(__file__).parents[2]

_DIVIDED = re.compile(r"deft: (\d+) of \d+ layers decode through tree attention")
_LEFT = re.compile(r"deft: .*(?:host's own|not supported|failed|alone|decode through the host's).*")
_WORKS = re.compile(r"deft: decode (?:of \d+ layers )?goes through tree attention")


@dataclass(frozen=True)
class Place:
    """Where the engines run.

    Attributes
    ----------
    host : str
        "sglang" or "vllm".
    gpu : bool
    share : float
        Part of the GPU's memory for one engine.
    """

    host: str
    gpu: bool
    share: float = 0.06

    @property
    def requests(self) -> dict[str, int]:
        """Arguments of the requests: short ones on the CPU, whose kernels are interpreted."""
        if self.gpu:
            return {"ids": VOCABULARY, "prefix": 1500, "branch": 300, "leaves": 12, "tokens": 48}
        return {"ids": VOCABULARY, "prefix": 90, "branch": 30, "leaves": 2, "tokens": 10}

    def options(self) -> dict[str, Any]:
        """Arguments of the engine."""
        if self.host == "sglang":
            if not self.gpu:
                return {"device": "cpu", "max_total_tokens": 16384, "max_running_requests": 16}
            return {
                "mem_fraction_static": 0.5, "max_total_tokens": 100_000,
                "max_running_requests": 64, "cuda_graph_bs_decode": [1, 8, 16, 32],
                "cuda_graph_backend_prefill": "disabled",
            }  # fmt: skip
        common: dict[str, Any] = {"max_model_len": 4096, "max_num_seqs": 32}
        if not self.gpu:
            return {**common, "enforce_eager": True}
        return {**common, "gpu_memory_utilization": self.share}

    def environment(self) -> dict[str, str]:
        """The engine's environment."""
        found = {**os.environ, "PYTHONPATH": str(_ROOT), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        found |= {"DEFT_MIN_SAVED_MS": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
        if self.gpu:
            return found
        found |= {"TRITON_INTERPRET": "1", "SGLANG_USE_CPU_ENGINE": "1"}
        found |= {"VLLM_CPU_KVCACHE_SPACE": "1", "DEFT_MIN_SHARE": "1"}
        found["DEFT_MIN_SHARED_TOKENS"] = "0"
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
    end = time.monotonic() + seconds
    with ThreadPoolExecutor(at_once) as threads:
        running = [
            threads.submit(_row, name, ARCHITECTURES[name], place, folder / name, end)
            for name in names
        ]
        for done in as_completed(running):
            yield done.result()


def _row(
    name: str, architecture: Architecture, place: Place, folder: Path, end: float
) -> dict[str, Any]:
    dtype = "bfloat16" if place.gpu else architecture.dtype
    query, kv, dim = architecture.heads
    row: dict[str, Any] = {
        "host": place.host, "version": _version(place.host), "architecture": name,
        "query_heads": query, "kv_heads": kv, "head_dim": dim, "kv_dtype": dtype,
        "layers_tree": 0, "layers_host": architecture.layers, "tokens_checked": 0,
        "tokens_wrong": 0, "ties": 0, "device": "gpu" if place.gpu else "cpu",
    }  # fmt: skip
    try:
        row |= _measure(architecture, place, folder, dtype, end)
    except Exception as error:
        row["note"] = f"{error}"[:300]
    return row


def _measure(
    architecture: Architecture, place: Place, folder: Path, dtype: str, end: float
) -> dict[str, Any]:
    folder.mkdir(parents=True, exist_ok=True)
    model = folder / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(architecture.config))
    for old in ("answers.json", "verdict.json"):
        (folder / old).unlink(missing_ok=True)
    common: dict[str, Any] = {
        "host": place.host, "model": str(model), "dtype": dtype, "shape": place.requests,
        "options": place.options(), "answers": str(folder / "answers.json"),
        "wait": max(1.0, end - time.monotonic()),
    }  # fmt: skip
    jobs = {
        "deft": Job(backend=BACKEND_NAMES[place.host], **common),
        "host": Job(backend=None, checked=str(folder / "verdict.json"), **common),
    }
    if place.gpu:
        started = {role: _start(role, job, place, folder) for role, job in jobs.items()}
        _wait(started, folder, end)
    else:  # two engines on the CPU take the same time one after the other, and less memory
        for role, job in jobs.items():
            _wait({role: _start(role, job, place, folder)}, folder, end)
    verdict = json.loads((folder / "verdict.json").read_text())
    log = (folder / "deft.log").read_text(errors="replace")
    tree = layers_of_tree(log, architecture.layers)
    found: dict[str, Any] = {
        "layers_tree": tree, "layers_host": architecture.layers - tree,
        "tokens_checked": verdict["tokens"], "tokens_wrong": verdict["wrong"],
        "ties": verdict["ties"],
    }  # fmt: skip
    if verdict["first_wrong"]:
        found["note"] = "; ".join(verdict["first_wrong"][:3])
    return found


def layers_of_tree(log: str, layers: int) -> int:
    """How many of a model's layers tree attention decoded, from the log of its engine."""
    if not _WORKS.search(log) or _LEFT.search(_DIVIDED.sub("", log).replace("host's kernels", "")):
        return 0
    divided = _DIVIDED.search(log)
    return layers if divided is None else int(divided.group(1))


def _start(role: str, job: Job, place: Place, folder: Path) -> subprocess.Popen[bytes]:
    path = folder / f"{role}.job.json"
    job.save(path)
    environment = {**place.environment(), "DEFT_STATE_DIR": str(folder / f"{role}-state")}
    with (folder / f"{role}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.zoo.worker", str(path)], cwd=_ROOT,
            env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip


def _wait(started: Mapping[str, subprocess.Popen[bytes]], folder: Path, end: float) -> None:
    """Wait for engines to end; end all of them if one fails or time is up."""
    try:
        while any(process.poll() is None for process in started.values()):
            failed = [role for role, process in started.items() if process.poll()]
            if failed:
                raise RuntimeError(f"{failed[0]}: {_last_error(folder / f'{failed[0]}.log')}")
            if time.monotonic() > end:
                raise TimeoutError("time was up")
            time.sleep(0.2)
        for role, process in started.items():
            if process.returncode:
                raise RuntimeError(f"{role}: {_last_error(folder / f'{role}.log')}")
    finally:
        for process in started.values():
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and its children: they are a session of their own."""
    if process.poll() is None:
        os.killpg(process.pid, 15)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)


def _last_error(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    errors = [line.strip() for line in lines if re.match(r"\s*\S*(Error|Exception)\b.*:", line)]
    return (errors or [line for line in lines if line.strip()] or ["no output"])[-1]


def _version(host: str) -> str:
    for package in (host, f"{host}-cpu"):
        found = installed_version(package)
        if found is not None:
            return found
    return "unknown"
