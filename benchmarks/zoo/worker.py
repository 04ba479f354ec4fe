"""One engine of the zoo in a process of its own: it answers, or checks another engine's answers.

``python -m benchmarks.zoo.worker JOB`` reads a file with a :class:`Job` and writes its result.
Importing this module fills the models of SGLang: its processes import the main module again.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.zoo.answering import check
from benchmarks.zoo.engines import VLLM, SGLang, fill_models_of_sglang, fill_models_of_vllm
from benchmarks.zoo.prompts import requests


@dataclass(frozen=True)
class Job:
    """What one engine does.

    Attributes
    ----------
    host, backend : str
        The host, and its name for the attention backend; None lets the host choose.
    model, dtype : str
        The model's folder, and the name of the dtype it runs in.
    options : dict
        Further arguments of the engine.
    shape : dict
        Arguments of :func:`~benchmarks.zoo.prompts.requests`.
    answers : str
        The file of answers: written, or read and checked if `checked` names a file for the result.
    checked : str, optional
    wait : float
        Seconds to wait for the answers.
    """

    host: str
    backend: str | None
    model: str
    dtype: str
    options: dict[str, Any]
    shape: dict[str, int]
    answers: str
    checked: str | None = None
    wait: float = 300.0

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


def run(job: Job) -> None:
    """Make the engine and do the job."""
    asked = requests(**job.shape)
    make = SGLang if job.host == "sglang" else VLLM
    engine = make(job.model, job.backend, {**job.options, "dtype": job.dtype})
    try:
        engine.answer([asked.first], [1])
        if job.checked is None:
            found = engine.answer(asked.batch, [asked.tokens] * len(asked.batch))
            _write(Path(job.answers), [answer.ids for answer in found])
            return
        verdict = check(engine, asked.batch, _read(Path(job.answers), job.wait), job.dtype)
        _write(Path(job.checked), asdict(verdict))
    finally:
        engine.close()


def _read(path: Path, seconds: float) -> list[list[int]]:
    """The answers, as soon as the other engine has written them."""
    end = time.monotonic() + seconds
    while not path.exists():
        if time.monotonic() > end:
            raise TimeoutError(f"no answers came within {seconds:.0f} s: {path}")
        time.sleep(0.2)
    answers: list[list[int]] = json.loads(path.read_text())
    return answers


def _write(path: Path, content: Any) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content))
    os.replace(temporary, path)


if find_spec("sglang") is not None and __name__ in ("__main__", "__mp_main__"):
    fill_models_of_sglang()

if __name__ == "__main__":
    job = Job(**json.loads(Path(sys.argv[1]).read_text()))
    if job.host == "vllm":
        fill_models_of_vllm()
    run(job)
