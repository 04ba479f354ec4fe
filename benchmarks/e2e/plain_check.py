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

PLAIN = "pytorch"
"""The reference's name."""

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
        If the model in plain PyTorch does not compute prompts as this server does.
    """
    dtype = "bfloat16" if launch.host.on_gpu() else "float32"
    named = _option(launch.options, "--kv-cache-dtype")
    eight = CACHES.get(named or "auto")
    prefill = {**os.environ, **launch.environment}.get("DEFT_FALLBACK_BACKEND", "fa3")
    if eight and (launch.host.name, prefill) != ("sglang", "fa3"):
        raise ChoiceError(
            f"--reference {PLAIN} over a cache of {named}: {launch.host.name} computes prompts in "
            f"an arithmetic that it does not know; expected sglang with fa3, or a cache of {dtype}"
        )
    return Names(dtype, eight or dtype, eight is not None)


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
