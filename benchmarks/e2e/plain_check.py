"""The check of sampled answers by a model in plain PyTorch, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.e2e.backends import Launch
from benchmarks.e2e.choice import ChoiceError
from benchmarks.e2e.served_model import CHECKOUT
from deft_backend.json_file import read_json

PLAIN = "pytorch"
"""The reference's name."""

DTYPES = {"half": "float16", "float": "float32"}
"""Dtypes by the hosts' other names."""

CACHES = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}
"""Dtypes of the hosts' caches of 8 bits, by the hosts' names."""

_MOST_STDERR = 800


class Names(NamedTuple):
    """A server's arithmetic, with the names of its dtypes."""

    dtype: str
    cache: str
    coarse_prompts: bool


def arithmetic_of(launch: Launch) -> Names:
    """How the server with the plugin computes.

    Raises
    ------
    ChoiceError
        If the model in plain PyTorch does not compute as this server does, or is another model.
    """
    _check_model(Path(launch.model.path))
    dtype = _option(launch.options, "--dtype") or "auto"
    if dtype == "auto":
        dtype = "bfloat16" if launch.host.on_gpu() else "float32"
    dtype = DTYPES.get(dtype, dtype)
    named = _option(launch.options, "--kv-cache-dtype")
    eight = CACHES.get(named or "auto")
    prefill = {**os.environ, **launch.environment}.get("DEFT_FALLBACK_BACKEND", "fa3")
    if eight and (launch.host.name, prefill) != ("sglang", "fa3"):
        raise ChoiceError(
            f"--reference {PLAIN} over a cache of {named}: {launch.host.name} computes prompts in "
            f"an arithmetic that it does not know; expected sglang with fa3, or a cache of {dtype}"
        )
    return Names(dtype, eight or dtype, eight is not None)


def _check_model(folder: Path) -> None:
    config = read_json(folder / "config.json", ChoiceError, "the model ")
    kind, scaled = config.get("model_type"), config.get("rope_scaling")
    if kind != "llama" or scaled or config.get("tie_word_embeddings"):
        raise ChoiceError(
            f"--reference {PLAIN} does not know the model in {folder}; expected model_type llama, "
            "without rope_scaling and tied embeddings: leave --model out, or name a backend"
        )


def _option(options: Sequence[str], name: str) -> str | None:
    """The value of a host's option; the last one wins."""
    found = None
    for option, behind in zip(options, (*options[1:], ""), strict=False):
        key, given, value = option.partition("=")
        if key == name:
            found = value if given else behind
    return found


def check_in_process(launch: Launch, samples: Path, tolerance: float) -> dict[str, Any]:
    """The result of the check of a server's samples, as a row holds it.

    Raises
    ------
    RuntimeError
        If the process failed; the message ends with what it wrote.
    """
    asked = json.dumps([tolerance, *arithmetic_of(launch)])
    program = [sys.executable, "-m", "benchmarks.plain_answers"]
    done = subprocess.run(
        [*program, launch.model.path, str(samples.resolve()), asked],
        cwd=CHECKOUT, capture_output=True, text=True, errors="replace", check=False,
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(
            f"the check in plain PyTorch ended with {done.returncode}: "
            f"{done.stderr.strip()[-_MOST_STDERR:] or '(nothing)'}"
        )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"against": PLAIN}
