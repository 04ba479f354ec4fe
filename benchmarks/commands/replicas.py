"""``python -m benchmarks replicas``: KV read by replicas behind a router."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.row_files import write_rows
from deft_backend.cli.errors import fail, say
from deft_backend.files.provenance import provenance
from deft_backend.tools.servers.command import installed_hosts

POLICIES = ("round_robin", "cache_aware")
ROUTERS = ("sglang-router", "vllm-router")


def replicas(
    router: Annotated[str, typer.Option(help="The router: sglang-router or vllm-router.")],
    model: Annotated[str, typer.Option(help="Folder of the served model.")] = "models/tiny-llama",
    prefixes: Annotated[int, typer.Option(min=1, help="Prefixes.")] = 8,
    branches: Annotated[int, typer.Option(min=1, help="Requests of each prefix.")] = 6,
    characters: Annotated[int, typer.Option(min=4, help="Length of a prefix.")] = 1200,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of each answer.")] = 12,
    together: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 16,
    options: Annotated[
        list[str] | None, typer.Argument(help="The host's options, after `--`.")
    ] = None,
    out: Annotated[Path, typer.Option(help="File of rows.")] = Path("reports/replicas.json"),
) -> None:
    """KV read by one server, and by two behind a router: in turns, and by prefix."""
    if router not in ROUTERS:
        raise fail(f"--router is {router!r}; expected one of {', '.join(ROUTERS)}")
    if shutil.which(router) is None:
        raise fail(f"{router} is not installed; run `pip install {router}`")
    from benchmarks.replicas import Trace, measure

    console = Console()
    trace = Trace(prefixes, branches, characters, tokens, together)
    host = installed_hosts()[0]
    rows: list[dict[str, Any]] = []
    header = {**provenance(), "command": " ".join(["python -m benchmarks", *sys.argv[1:]]),
              "host": host, "trace": vars(trace)}  # fmt: skip
    for found in measure(host, router, POLICIES, model, trace, options=options or ()):
        rows.append(found)
        say(console, f"{found['setup']}, {found['policy']}: read {found['read_share']:.0%}")
        write_rows(out, rows, header)
