"""``python -m benchmarks start``: seconds from the start of a server to its first answer.

Each backend starts twice over caches of its own: the package's, those of Triton, of PyTorch's
compiler and of the hosts. They are empty at the first start and full at the second. One more
start, which does not count, comes first: it brings the host's files into memory, and fills caches
that the backends share. Then a batch behind a shared prefix is sent three times with other tokens:
if its first time is longer, something was compiled or loaded late.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from benchmarks.e2e.command import (
    ERRORS,
    HostArguments,
    ModelChoice,
    ShapeOption,
    StartOption,
    TpOption,
    checked_ranks,
    listed,
    served_model,
    typed_command,
)
from benchmarks.e2e.launch import HOSTS, Launch, checked_backends
from benchmarks.e2e.run import LOST, client_of, server_of
from benchmarks.e2e.workloads import draw
from benchmarks.row_files import driver, make_folder, read_rows, write_rows
from deft_backend.cli.errors import host_arguments, reported, say, unwound
from deft_backend.cli.serve import HostOption, chosen_host
from deft_backend.files.provenance import provenance
from deft_backend.tools.harness.answers import NotAnswered

CACHES = (
    "DEFT_CACHE_DIR",
    "TRITON_HOME",
    "TORCHINDUCTOR_CACHE_DIR",
    "VLLM_CACHE_ROOT",
    "SGLANG_CACHE_DIR",
)
"""Folders of compiled code that depend on the attention backend. ``TRITON_CACHE_DIR`` is none of
them: where the user does not set it, hosts and PyTorch's compiler choose it, for each GPU."""

BATCHES = 3

KEYS = ("host", "tp", "backend", "cache", "seconds", "batches_ms")


def start(
    host_args: HostArguments = None,
    host: HostOption = None,
    backends: Annotated[
        str | None,
        typer.Option(metavar="NAME[,NAME…]", help="Default: the plugin and the host's own."),
    ] = None,
    shape: ShapeOption = None,
    tp: TpOption = 1,
    branches: Annotated[int, typer.Option(min=1, help="Requests of the batches.")] = 32,
    settle: Annotated[
        bool, typer.Option(help="Begin with a start of the host's own backend that is not counted.")
    ] = True,
    out: Annotated[
        Path, typer.Option(help="JSON file of rows; rows of other hosts and --tp are kept.")
    ] = Path("reports/start.json"),
    start_timeout: StartOption = 500.0,
) -> None:
    """Start each backend with empty kernel caches, then with full ones; dummy weights.

    Exits with 1 if a server did not start.
    """
    console = Console()
    chosen = HOSTS[chosen_host(host, needed=False)]
    with reported(*ERRORS), ExitStack() as opened:
        own = f"{chosen.ours},{chosen.reference()}"
        names = checked_backends(chosen, listed(backends or own))
        make_folder(out)
        rows = read_rows(out, KEYS, "python -m benchmarks start")[0] if out.is_file() else []
        rows = [row for row in rows if (row["host"], row["tp"]) != (chosen.name, tp)]
        model = opened.enter_context(
            served_model(chosen, ModelChoice(shape=shape, weights="dummy"))
        )
        launch = Launch(chosen, model, tuple(host_arguments(host_args)), tensor_parallel=tp)
        launch = checked_ranks(replace(launch, start_seconds=start_timeout))
        caches = opened.enter_context(tempfile.TemporaryDirectory(prefix="deft-start-"))
        header = {**provenance(), "driver": driver(), "command": typed_command()}
        began = len(rows)
        with unwound(console, f"all servers have ended; finished rows are in {out}"):
            # A model may have no use for the host's usual backend.
            first = next((name for name in names if name != chosen.ours), chosen.reference())
            starts = [(first, "uncounted", 0)] if settle else []
            starts += [(n, c, at) for at, n in enumerate(names, 1) for c in ("empty", "full")]
            for backend, cache, number in starts:
                folders = {name: f"{caches}/{number}/{name}" for name in CACHES}
                into = replace(launch, environment=folders)
                row = _started(into, backend, cache, branches, out.with_suffix(".logs"), console)
                if cache != "uncounted":
                    rows.append(row)
                    write_rows(out, rows, header)
    say(console, f"rows    {out}")
    if any(row["error"] for row in rows[began:]):
        raise typer.Exit(1)


def _started(
    launch: Launch, backend: str, cache: str, branches: int, logs: Path, console: Console
) -> dict[str, Any]:
    """One start of a server.

    ``seconds`` is the time from the start of the process to the first answer. ``batches_ms`` holds
    the median times to first token of the first batches. ``log`` holds the plugin's lines.
    """
    prefix = 4096 if launch.host.on_gpu() else 64
    row: dict[str, Any] = {"host": launch.host.name, "tp": launch.tensor_parallel}
    row |= {"backend": backend, "cache": cache, "model": launch.model.name}
    row |= {"options": launch.label, "seconds": None, "prefix": prefix, "branches": branches}
    row |= {"batches_ms": [], "log": [], "error": None}
    folder = logs / cache
    began = time.perf_counter()
    try:
        with server_of(launch, backend, folder, partial(say, console)) as server:
            asyncio.run(_ask(row, launch, server.url, began))
            lines = server.log.read_text(errors="replace").splitlines()
            row["log"] = [line[-200:] for line in lines if "deft: " in line]
    except (*LOST, NotAnswered) as error:
        row["error"] = str(error)
    say(console, f"{backend}, {cache} caches: {row['error'] or row['seconds']}")
    return row


async def _ask(row: dict[str, Any], launch: Launch, url: str, began: float) -> None:
    chance = random.Random(1)
    ids = launch.model.ids
    async with client_of(url) as client:
        await client.batch([draw(chance, ids, 8)], 1)
        row["seconds"] = round(time.perf_counter() - began, 2)
        shared = draw(chance, ids, row["prefix"])
        await client.batch([shared], 1)
        for _ in range(BATCHES):
            prompts = [shared + draw(chance, ids, 32) for _ in range(row["branches"])]
            found = await asyncio.gather(*(client.ask(prompt, 8) for prompt in prompts))
            middle = statistics.median(answer.ttft for answer, _ in found)
            row["batches_ms"].append(round(middle * 1e3, 2))
