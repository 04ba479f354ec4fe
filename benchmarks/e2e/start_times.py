"""Seconds from the start of a server to its first answer, with empty and with full kernel caches.

Each backend starts twice over caches of its own: the package's, those of Triton, of PyTorch's
compiler and of the hosts. They are empty at the first start and full at the second. One more
start, which does not count, comes first: it brings the host's files into memory, and fills caches
that the backends share. Then a batch behind a shared prefix is sent three times with other tokens:
if its first time is longer, something was compiled or loaded late.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypedDict

from benchmarks.e2e.backends import Launch
from benchmarks.e2e.counted_server import CountedServer
from benchmarks.e2e.prompt_cases import draw
from benchmarks.token_client.client import Client, ClientError
from deft_backend.tools.servers.command import StartError
from deft_backend.tools.servers.driver_stub import DriverStubError

CACHES = (
    "DEFT_CACHE_DIR", "TRITON_HOME", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT",
    "SGLANG_CACHE_DIR",
)  # fmt: skip
"""Folders of compiled code that depend on the attention backend. ``TRITON_CACHE_DIR`` is none of
them: where the user does not set it, hosts and PyTorch's compiler choose it, for each GPU."""

BATCHES = 3


class StartRow(TypedDict):
    """One start of a server.

    ``tp`` counts the GPUs over which the server splits the model. ``seconds`` is the time from the
    start of the process to the first answer. ``batches_ms`` holds the times to first token of the
    first batches, each of ``branches`` requests behind a cached prefix. ``log`` holds the plugin's
    lines. ``error`` says why there are no figures.
    """

    host: str
    tp: int
    backend: str
    cache: str
    model: str
    options: str
    seconds: float | None
    prefix: int
    branches: int
    batches_ms: list[float]
    log: list[str]
    error: str | None


def start_times(
    launch: Launch,
    backends: Sequence[str],
    logs: Path,
    said: Callable[[str], None],
    *,
    prefix: int,
    branches: int,
    timeout: float,
    first: str | None,
) -> Iterator[StartRow]:
    """Start each backend with empty caches and with full ones.

    Parameters
    ----------
    launch : Launch
    backends : sequence of str
    logs : Path
        Folder of the servers' logs.
    said : callable
        Called with each line of progress.
    prefix, branches : int
        Tokens of the shared prefix, and requests, of the batches.
    timeout : float
        Time limit for a start, in seconds.
    first : str, optional
        The backend of the start that does not count; None leaves it out.
    """
    with tempfile.TemporaryDirectory(prefix="deft-start-") as folder:

        def start(backend: str, cache: str, number: int) -> StartRow:
            caches = {name: f"{folder}/{number}/{name}" for name in CACHES}
            into = replace(launch, environment={**launch.environment, **caches})
            row = _row(launch, backend, cache, prefix, branches)
            log = logs / f"{launch.host.name}-{backend}-{cache}.log"
            said(f"{backend}, {cache} caches: starting the server; its log is {log}")
            _measure(row, into, log, timeout)
            return row

        if first is not None:
            start(first, "uncounted", 0)
        for number, backend in enumerate(backends, 1):
            for cache in ("empty", "full"):
                yield start(backend, cache, number)


def _measure(row: StartRow, launch: Launch, log: Path, timeout: float) -> None:
    """Start a server and put what it took into the row."""
    began = time.perf_counter()
    try:
        command = partial(launch.command, row["backend"])
        with CountedServer(command, log, timeout=timeout) as server:
            asyncio.run(_ask(row, launch, server.url, began))
    except (StartError, DriverStubError, ClientError) as error:
        row["error"] = str(error)
    if log.is_file():
        lines = log.read_text(errors="replace").splitlines()
        row["log"] = [line[-200:] for line in lines if "deft: " in line]


async def _ask(row: StartRow, launch: Launch, url: str, began: float) -> None:
    ids = random.Random(1)
    async with Client(url, launch.host.name) as client:
        await client.batch([draw(ids, launch.model, 8)], 1)
        row["seconds"] = round(time.perf_counter() - began, 2)
        shared = draw(ids, launch.model, row["prefix"])
        await client.batch([shared], 1)
        for _ in range(BATCHES):
            prompts = [shared + draw(ids, launch.model, 32) for _ in range(row["branches"])]
            answers = await asyncio.gather(*(client.stream(prompt, 8) for prompt in prompts))
            firsts = sorted(answer.arrivals[0] for answer in answers)
            row["batches_ms"].append(round(firsts[len(firsts) // 2] * 1e3, 2))


def _row(launch: Launch, backend: str, cache: str, prefix: int, branches: int) -> StartRow:
    return StartRow(
        host=launch.host.name, tp=launch.tensor_parallel, backend=backend, cache=cache,
        model=launch.model.name, options=launch.label, seconds=None, prefix=prefix,
        branches=branches, batches_ms=[], log=[], error=None,
    )  # fmt: skip
