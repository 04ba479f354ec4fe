"""``python -m benchmarks step-hooks``: what the plugin adds to a replayed decode step."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from deft_backend.cli.errors import fail


def step_hooks(
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    repeats: Annotated[int, typer.Option(help="Timed blocks of 1,000 steps.", min=1)] = 25,
) -> None:
    """Time the plugin's hooks around a replayed step of SGLang: one row for each batch."""
    if find_spec("sglang") is None:
        raise fail(
            "step-hooks times SGLang's decode steps, and sglang is not installed; run it with the "
            "Python of the server's environment"
        )
    from benchmarks.step_hooks.hook_times import measure_hooks

    measure_hooks(out, repeats, lambda row: typer.echo(json.dumps(row)))
