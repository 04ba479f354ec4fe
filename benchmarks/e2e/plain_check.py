"""The check of sampled answers by a model in plain PyTorch, in a process of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.e2e.backends import Launch
from benchmarks.e2e.choice import ChoiceError
from benchmarks.e2e.own_process import run_module

PLAIN = "pytorch"
"""The reference's name."""


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
        If the model in plain PyTorch does not compute as this server does.
    """
    host, on_gpu = launch.host.name, launch.host.on_gpu()
    dtype = "bfloat16" if on_gpu else "float32"
    asked = _option(launch.options, "--dtype")
    cache = _option(launch.options, "--kv-cache-dtype")
    prefill = {**os.environ, **launch.environment}.get("DEFT_FALLBACK_BACKEND", "fa3")
    if asked in ("auto", dtype):
        if cache in ("auto", dtype):
            return Names(dtype, dtype, coarse_prompts=False)
        if cache == "fp8_e4m3" and on_gpu and (host, prefill) == ("sglang", "fa3"):
            return Names(dtype, "float8_e4m3fn", coarse_prompts=True)
    raise ChoiceError(
        f"the reference {PLAIN} does not know the arithmetic of {host} with --dtype {asked} and "
        f"--kv-cache-dtype {cache}; expected {dtype} for both or, in sglang on a GPU with prompts "
        "by fa3, a cache of fp8_e4m3: name a backend instead"
    )


def _option(options: Sequence[str], name: str) -> str:
    """The value of a host's option, ``auto`` without it; the last one wins."""
    found = "auto"
    for option, behind in zip(options, (*options[1:], ""), strict=False):
        key, given, value = option.partition("=")
        if key == name:
            found = value if given else behind
    return found


def check_in_process(launch: Launch, samples: Path, tolerance: float) -> dict[str, Any]:
    """The result of the check of a server's samples, as a row holds it.

    Raises
    ------
    ProcessFailed
        If the process failed.
    """
    asked = json.dumps([tolerance, *arithmetic_of(launch)])
    printed = run_module(
        "benchmarks.plain_answers", launch.model.path, str(samples.resolve()), asked
    )
    found: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return found | {"against": PLAIN}
