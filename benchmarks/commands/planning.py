"""``python -m benchmarks planning-host`` and ``planning-device``: how long a plan takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from deft_backend.cli.errors import fail, reported


def planning_host(
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    requests: Annotated[
        list[int] | None,
        typer.Option(help="Batch size: 64, 256 or 1024; may be repeated. Default: all three."),
    ] = None,
    policy: Annotated[str, typer.Option(help="Policy to plan with.")] = "auto",
    repeats: Annotated[int, typer.Option(help="Timed calls for each figure.", min=1)] = 200,
) -> None:
    """Time the host planner on one core: one row for each batch size, page size and order."""
    from benchmarks.planning.host_planning import FAN_OUTS, measure_batches
    from deft_backend.policies import PolicyError

    if unknown := set(requests or ()) - set(FAN_OUTS):
        raise fail(f"--requests is {min(unknown)}; expected one of {', '.join(map(str, FAN_OUTS))}")
    with reported(PolicyError):
        measure_batches(out, requests, policy, repeats, lambda row: typer.echo(json.dumps(row)))


def planning_device(
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    policy: Annotated[str, typer.Option(help="Policy to plan with.")] = "auto",
    launch_ms: Annotated[
        int, typer.Option(help="Milliseconds that each figure is repeated for.", min=1)
    ] = 40,
    only: Annotated[
        str, typer.Option(help="Measure only batches whose name holds this, such as beams.")
    ] = "",
) -> None:
    """Time the device planner on this GPU: one row for each batch."""
    import torch

    from benchmarks.planning.device_planning import measure_batches
    from deft_backend.policies import PolicyError

    if not torch.cuda.is_available():
        raise fail(
            "planning-device needs an NVIDIA GPU, and torch finds none; planning-host times the "
            "host planner"
        )
    with reported(PolicyError):
        measure_batches(out, policy, launch_ms, only, lambda row: typer.echo(json.dumps(row)))
