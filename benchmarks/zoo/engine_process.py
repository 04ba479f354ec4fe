"""Engines of the zoo, one after the other: each answers, or checks another engine's answers.

``python -m benchmarks.zoo.engine_process JOB...`` reads files with a :class:`Job` and writes the
results.
Importing this module fills the models of SGLang: its processes import the main module again.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.zoo.answering import check
from benchmarks.zoo.host_engines import (
    VLLM,
    SGLang,
    fill_models_of_sglang,
    fill_models_of_vllm,
    register_kernels_of_vllm_once,
)
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
    log : str
        The file of the engine's log.
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
    log: str
    checked: str | None = None
    wait: float = 300.0

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


def run(job: Job) -> None:
    """Make the engine and do the job; its output goes to the job's log."""
    with open(job.log, "w") as log:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(log.fileno(), stream.fileno())
    asked = requests(**job.shape)
    make = SGLang if job.host == "sglang" else VLLM
    engine = make(job.model, job.backend, {**job.options, "dtype": job.dtype})
    try:
        engine.answer([asked.first], [1])
        if job.checked is None:
            found = engine.answer(asked.batch, [asked.tokens] * len(asked.batch))
            _write(Path(job.answers), [answer.ids for answer in found])
            return
        answers = _read(Path(job.answers), job.wait)
        kv_dtype = job.options.get("kv_cache_dtype")
        verdict = check(engine, asked.batch, answers, job.dtype, kv_dtype)
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


def _log() -> None:
    """Write the plugin's lines, whichever way the host sets up its own log."""
    logger = logging.getLogger("deft_backend")
    logger.addHandler(logging.StreamHandler(sys.stdout))
    logger.setLevel(logging.INFO)
    logger.propagate = False


if __name__ in ("__main__", "__mp_main__"):
    _log()
if find_spec("sglang") is not None and __name__ in ("__main__", "__mp_main__"):
    fill_models_of_sglang()


def main(paths: list[str]) -> None:
    """Do the jobs. A job that fails leaves its error in the log; the next one still runs."""
    failed = False
    for path in paths:
        job = Job(**json.loads(Path(path).read_text()))
        try:
            run(job)
        except Exception:
            failed = True
            traceback.print_exc()
    sys.stdout.flush()
    # The engines have done their work. vLLM's in this process would take long to end.
    os._exit(failed)


if __name__ == "__main__":
    if find_spec("vllm") is not None:
        fill_models_of_vllm()
        register_kernels_of_vllm_once()
    main(sys.argv[1:])
