"""Run architectures of the zoo: tree attention answers, and the host's own backend checks.

The models keep what matters to attention: the kinds of layers and their order, the head dimension,
and the number of query heads that share a KV head. All other sizes are small.
"""

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from deft_backend.settings.version import installed_version
from deft_backend.tools.servers.command import BACKEND_NAMES, free_port
from deft_backend.tools.servers.driver_stub import ensure_driver_stub, has_nvidia_driver, num_gpus

ROOT = Path(__file__).parents[2]

KEYS = (
    "host", "version", "architecture", "query_heads", "kv_heads", "head_dim", "kv_dtype",
    "layers_tree", "layers_host", "tokens_checked", "tokens_wrong", "ties",
)  # fmt: skip
"""Keys of a row, besides ``device`` and ``note``."""

TIME_UP = "time was up"

_DIVIDED = re.compile(r"deft: (\d+) of \d+ layers decode through tree attention")
_LEFT = re.compile(r"deft: .*(?:host's own|not supported|failed|alone|decode through the host's).*")
_ERROR = re.compile(r"(?:^|[ (])[A-Za-z.]*(?:Error|Exception)\b.*:")
_WORKS = re.compile(
    r"deft: (?:decode|verification of (?:up to )?\d+ tokens(?: a request)?) "
    r"(?:of \d+ layers )?goes through tree attention"
)
_started = []


@dataclass(frozen=True)
class Architecture:
    """One architecture of ``architectures.json``."""

    title: str  # its name in prose
    tree: int  # layers that decode through tree attention
    cpu: list[str]  # hosts whose CPU engine runs it
    config: dict  # its ``config.json``
    ci: list[str] = field(default_factory=list)  # hosts that run it in the integration tests
    dtype: str = "float32"  # on the CPU; GPUs run bfloat16

    @property
    def layers(self):
        return self.config["num_hidden_layers"]

    @property
    def heads(self):
        """Query heads, KV heads and head dimension of the layers with full attention."""
        dim = self.config.get("global_head_dim") or self.config["head_dim"]
        return self.config["num_attention_heads"], self.config["num_key_value_heads"], dim


def _architectures():
    listed = json.loads(Path(__file__).with_name("architectures.json").read_text())
    base = listed.pop("_base")
    return {
        name: Architecture(**{**entry, "config": {**base, **entry["config"]}})
        for name, entry in listed.items()
    }


ARCHITECTURES = _architectures()
"""By name, the most telling first: a run that is cut short has these."""


@dataclass(frozen=True)
class Place:
    """Where the engines run; `asked` are the caller's own arguments of the engine."""

    host: str
    gpu: bool
    asked: dict = field(default_factory=dict)

    @property
    def requests(self):
        """Arguments of the requests: short ones on the CPU, whose kernels are interpreted."""
        if self.gpu:
            return {"ids": 1024, "prefix": 1500, "branch": 300, "leaves": 12, "tokens": 48}
        return {"ids": 1024, "prefix": 90, "branch": 30, "leaves": 2, "tokens": 8}

    def options(self):
        """Arguments of an engine, which has a port of its own."""
        if self.host == "sglang":
            own = {"port": free_port(), "device": "cpu", "max_total_tokens": 16384}
            own["max_running_requests"] = 16
            if self.gpu:
                own = {
                    "port": free_port(),
                    "mem_fraction_static": 0.8,
                    "max_total_tokens": 100_000,
                    "max_running_requests": 64,
                    "max_mamba_cache_size": 192,
                    "cuda_graph_bs_decode": [1, 8, 16, 32],
                    "cuda_graph_backend_prefill": "disabled",
                }
        else:
            own = {"max_model_len": 4096, "max_num_seqs": 32}
            # The share is what vLLM wants to find free. The cache's size does not depend on what
            # other engines take meanwhile.
            memory = {"gpu_memory_utilization": 0.06, "kv_cache_memory_bytes": 2 << 30}
            own |= memory if self.gpu else {"enforce_eager": True}
        return {**own, **self.asked}

    def environment(self, gpu_index=0):
        """The engine's environment, on one of the GPUs."""
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        found = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
        found |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
        if self.gpu:
            shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            found["CUDA_VISIBLE_DEVICES"] = shown[gpu_index] if shown[0] else str(gpu_index)
            return found
        found |= {"TRITON_INTERPRET": "1", "SGLANG_USE_CPU_ENGINE": "1"}
        found |= {"VLLM_CPU_KVCACHE_SPACE": "1"}
        if self.host == "sglang" and not has_nvidia_driver():
            paths = [str(ensure_driver_stub()), os.environ.get("LD_LIBRARY_PATH", "")]
            found["LD_LIBRARY_PATH"] = os.pathsep.join(path for path in paths if path)
        return found


@dataclass(frozen=True)
class Run:
    """One architecture at one place: its files, its jobs and its row."""

    name: str
    place: Place
    folder: Path
    gpu_index: int = 0

    @property
    def architecture(self):
        return ARCHITECTURES[self.name]

    @property
    def dtype(self):
        return "bfloat16" if self.place.gpu else self.architecture.dtype

    @property
    def done(self):
        return (self.folder / "verdict.json").is_file()

    def jobs(self, end):
        """Write the model and the jobs of both engines: ours answers, the host's checks."""
        model = self.folder / "model"
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text(json.dumps(self.architecture.config))
        for old in ("answers.json", "verdict.json", "deft.log", "host.log"):
            (self.folder / old).unlink(missing_ok=True)
        files = []
        for role in ("deft", "host"):
            ours = role == "deft"
            job = {
                "host": self.place.host,
                "backend": BACKEND_NAMES[self.place.host] if ours else None,
                "model": str(model),
                "dtype": self.dtype,
                "options": self.place.options(),
                "shape": self.place.requests,
                "answers": str(self.folder / "answers.json"),
                "checked": None if ours else str(self.folder / "verdict.json"),
                "log": str(self.folder / f"{role}.log"),
                "wait": max(1.0, end - time.monotonic()),
            }
            files.append(self.folder / f"{role}.job.json")
            files[-1].write_text(json.dumps(job))
        return files

    def row(self, note=""):
        """The result, or a row with a note that tells why there is none."""
        query, kv, dim = self.architecture.heads
        host, layers = self.place.host, self.architecture.layers
        version = installed_version(host) or installed_version(f"{host}-cpu") or "unknown"
        kv_dtype = self.place.asked.get("kv_cache_dtype") or self.dtype
        row = dict(zip(
            KEYS, (host, version, self.name, query, kv, dim, kv_dtype, 0, layers, 0, 0, 0),
            strict=True,
        ))  # fmt: skip
        row["device"] = "gpu" if self.place.gpu else "cpu"
        if self.place.asked:
            row["options"] = self.place.asked
        if not self.done:
            return {**row, "note": (note or self._last_error())[:300]}
        verdict = json.loads((self.folder / "verdict.json").read_text())
        tree = layers_of_tree((self.folder / "deft.log").read_text(errors="replace"), layers)
        row |= {"layers_tree": tree, "layers_host": layers - tree, "ties": verdict["ties"]}
        row |= {"tokens_checked": verdict["tokens"], "tokens_wrong": verdict["wrong"]}
        if verdict["first_wrong"]:
            row["note"] = "; ".join(verdict["first_wrong"][:3])
        return row

    def _last_error(self):
        for role in ("deft", "host"):
            log = self.folder / f"{role}.log"
            lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
            errors = [line.strip() for line in lines if _ERROR.search(line)]
            if errors:
                return f"{role}: {errors[-1]}"
        return "the engines left no result and no error"


def layers_of_tree(log, layers):
    """How many of a model's layers tree attention decoded, from the log of its engine."""
    if not _WORKS.search(log) or _LEFT.search(_DIVIDED.sub("", log).replace("host's kernels", "")):
        return 0
    divided = _DIVIDED.search(log)
    return layers if divided is None else int(divided.group(1))


def run(names, place, folder, at_once, seconds):
    """Yield a row for each architecture as soon as it is there, `at_once` at the same time.

    The whole run ends after `seconds`; architectures that have not ended get a row with a note.
    """
    gpus = max(1, num_gpus()) if place.gpu else 1
    runs = [Run(name, place, folder / name, at % gpus) for at, name in enumerate(names)]
    end = time.monotonic() + seconds
    if place.host == "vllm" and not place.gpu:
        yield from _in_one_process(runs, place, folder, end)
        return
    with ThreadPoolExecutor(at_once) as threads:
        running = [threads.submit(_in_two_processes, run, end) for run in runs]
        for done in as_completed(running):
            yield done.result()


def _in_two_processes(run, end):
    """Both engines in processes of their own; on the CPU one after the other, to save memory."""
    jobs = run.jobs(end)
    for group in [jobs] if run.place.gpu else [[job] for job in jobs]:
        started = [_start([job], run.place, run.folder, run.gpu_index) for job in group]
        note = _wait_for(started, end)
        if note:
            return run.row(note if note == TIME_UP else "")
    return run.row()


def _in_one_process(runs, place, folder, end):
    """All engines one after the other: importing the host takes longer than a small model."""
    process = _start([job for run in runs for job in run.jobs(end)], place, folder)
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


def _start(jobs, place, folder, gpu_index=0):
    with (folder / "worker.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "integration_tests.zoo.engines", *map(str, jobs)],
            cwd=ROOT,
            env=place.environment(gpu_index),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _started.append(process)
    return process


def _wait_for(started, end):
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


def end_all():
    """End every process that this one has started: they do not end with it."""
    for process in _started:
        _end(process)


def _end(process):
    """End a process and its children: they are a session of their own."""
    if process.poll() is None:
        os.killpg(process.pid, 15)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
