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
from deft_backend.tools.servers.command import server_command
from deft_backend.tools.servers.driver_stub import num_gpus
from deft_backend.tools.servers.sessions import end_session
from integration_tests.common.plugins import CPU_BACKEND, ROOT, plugin_settings

INSTALL = "integration_tests.zoo.engines:install"

KEYS = (
    *("host", "version", "architecture", "query_heads", "kv_heads", "head_dim", "kv_dtype"),
    *("layers_tree", "layers_host", "tokens_checked", "tokens_wrong", "ties"),
)
"""Keys of a row, besides ``device`` and ``note``."""

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
    title: str  # its name in prose
    tree: int  # layers that decode through tree attention
    cpu: list[str]  # hosts whose CPU engine runs it
    config: dict  # its ``config.json``
    in_tests: bool = False  # whether the integration tests run it on vLLM
    dtype: str = "float32"  # on the CPU; GPUs run bfloat16

    @property
    def layers(self):
        return self.config["num_hidden_layers"]

    @property
    def heads(self):
        """Query heads, KV heads and head dimension of the layers with full attention."""
        dim = self.config.get("global_head_dim") or self.config["head_dim"]
        return self.config["num_attention_heads"], self.config["num_key_value_heads"], dim


_listed = json.loads(Path(__file__).with_name("architectures.json").read_text())
_base = _listed.pop("_base")
ARCHITECTURES = {
    name: Architecture(**{**entry, "config": {**_base, **entry["config"]}})
    for name, entry in _listed.items()
}
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
        if self.host == "sglang":
            own = {"device": "cpu", "max_total_tokens": 16384, "max_running_requests": 16}
            if self.gpu:
                own = {
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

    def environment(self, folder, gpu_index):
        targets = [INSTALL, *([CPU_BACKEND] if self.host == "vllm" and not self.gpu else [])]
        command = server_command("", 0, host=self.host, gpu=self.gpu)
        found = {**command.full_environment(), **plugin_settings(folder, *targets)}
        found |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}
        if self.gpu:
            shown = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
            found["CUDA_VISIBLE_DEVICES"] = shown[gpu_index] if shown[0] else str(gpu_index)
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

    def job(self):
        """Write the model and the job of both engines: ours answers, the host's checks."""
        model = self.folder / "model"
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text(json.dumps(self.architecture.config))
        for old in ("verdict.json", "deft.log", "host.log"):
            (self.folder / old).unlink(missing_ok=True)
        job = {
            "host": self.place.host,
            "model": str(model),
            "dtype": self.dtype,
            "options": self.place.options(),
            "shape": self.place.requests,
            "folder": str(self.folder),
        }
        file = self.folder / "job.json"
        file.write_text(json.dumps(job))
        return file

    def row(self, note=""):
        """The result, or a row with a note that tells why there is none."""
        query, kv, dim = self.architecture.heads
        host, layers = self.place.host, self.architecture.layers
        version = installed_version(host) or installed_version(f"{host}-cpu") or "unknown"
        kv_dtype = self.place.asked.get("kv_cache_dtype") or self.dtype
        numbers = query, kv, dim, kv_dtype, 0, layers, 0, 0, 0
        row = dict(zip(KEYS, (host, version, self.name, *numbers), strict=True))
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
    # Importing vLLM takes longer than a small model on the CPU.
    groups = [runs] if place.host == "vllm" and not place.gpu else [[run] for run in runs]
    with ThreadPoolExecutor(at_once) as threads:
        for done in as_completed([threads.submit(_rows, group, end) for group in groups]):
            yield from done.result()


def _rows(runs, end):
    """The rows of architectures whose engines run in one process, one after the other."""
    first, jobs = runs[0], [str(run.job()) for run in runs]
    with (first.folder / "worker.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "integration_tests.zoo.engines", *jobs],
            cwd=ROOT,
            env=first.place.environment(first.folder / "plugins", first.gpu_index),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _started.append(process)
    note = ""
    try:
        process.wait(max(0.0, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        note = "time was up"
    finally:
        if process.returncode is None:
            end_session(process.pid)
            process.wait()
    return [run.row(note) for run in runs]


def end_all():
    """End every process that this one has started: they do not end with it."""
    for process in _started:
        if process.poll() is None:
            end_session(process.pid)
