"""``python -m benchmarks short-extends``: prefills of a few new tokens, with and without us."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from deft_backend.cli.errors import fail


def short_extends(
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    repeats: Annotated[int, typer.Option(help="Timed steps of each kind.", min=1)] = 10,
    memory: Annotated[
        float, typer.Option(help="Part of the GPU's memory that the engine takes.")
    ] = 0.85,
) -> None:
    """Time short extends in vLLM's engine: one row for each number of requests and new tokens."""
    if find_spec("vllm") is None:
        raise fail(
            "short-extends times vLLM's steps, and vllm is not installed; run it with the Python "
            "of the server's environment"
        )
    from benchmarks.step_hooks.extend_steps import measure_extends

    options = {"gpu_memory_utilization": memory}
    measure_extends(out, repeats, options, lambda row: typer.echo(json.dumps(row)))
