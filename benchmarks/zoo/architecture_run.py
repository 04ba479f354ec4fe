"""One architecture at one place: the files of its engines, and the row of its result."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.zoo.architectures import Architecture
from benchmarks.zoo.engine_process import Job
from benchmarks.zoo.place import Place
from deft_backend.settings.version import installed_version

KEYS = (
    "host", "version", "architecture", "query_heads", "kv_heads", "head_dim", "kv_dtype",
    "layers_tree", "layers_host", "tokens_checked", "tokens_wrong", "ties",
)  # fmt: skip
"""Keys of a row, besides ``device`` and ``note``."""

_DIVIDED = re.compile(r"deft: (\d+) of \d+ layers decode through tree attention")

_LEFT = re.compile(r"deft: .*(?:host's own|not supported|failed|alone|decode through the host's).*")

_ERROR = re.compile(r"(?:^|[ (])[A-Za-z.]*(?:Error|Exception)\b.*:")

_WORKS = re.compile(
    r"deft: (?:decode|verification of (?:up to )?\d+ tokens(?: a request)?) "
    r"(?:of \d+ layers )?goes through tree attention"
)


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
            "kv_dtype": self.place.kv_dtype or self.dtype, "layers_tree": 0, "layers_host": layers,
            "tokens_checked": 0, "tokens_wrong": 0, "ties": 0,
            "device": "gpu" if self.place.gpu else "cpu",
        }  # fmt: skip
        if self.place.asked:
            row["options"] = dict(self.place.asked)
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


def layers_of_tree(log: str, layers: int) -> int:
    """How many of a model's layers tree attention decoded, from the log of its engine."""
    if not _WORKS.search(log) or _LEFT.search(_DIVIDED.sub("", log).replace("host's kernels", "")):
        return 0
    divided = _DIVIDED.search(log)
    return layers if divided is None else int(divided.group(1))


def _version(host: str) -> str:
    for package in (host, f"{host}-cpu"):
        found = installed_version(package)
        if found is not None:
            return found
    return "unknown"
