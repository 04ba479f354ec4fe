"""CPU time that the plugin adds to a decode step that SGLang replays from a graph, on one core.

``python -m deft_backend.bench.step_hooks --out FILE``

SGLang must be installed. The real backend that plans on the device and the real fence for page
tables, around a host that does nothing: no GPU is needed, and what is left is the plugin's own. A
replayed step calls nothing else of it; the host's own metadata, which it spares, is not subtracted,
and what the fence holds up on a GPU does not show. ``look_us`` is what the thread beside
takes of the processor whenever it writes the server's state, `looks_a_second` times.
"""

from __future__ import annotations

import ctypes
import json
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from deft_backend.bench.planning import processor, use_one_core
from deft_backend.bench.provenance import provenance
from deft_backend.bench.row_files import write_object
from deft_backend.servers.driver_stub import SONAME, ensure_driver_stub, has_nvidia_driver
from deft_backend.telemetry.state import INTERVAL, ServerState, StateWriter

REQUESTS = (2, 32, 256, 1024)
CONTEXTS = (2048, 65536)
STEPS = 1000
"""Calls that are timed together: reading the clock would be part of one."""


def microseconds(step: Callable[[], None], repeats: int) -> float:
    """Median time of a step."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        for _ in range(STEPS):
            step()
        times.append((time.perf_counter() - began) / STEPS)
    return round(float(np.median(times)) * 1e6, 3)


def look_microseconds(state: ServerState, directory: Path, repeats: int) -> float:
    """Median processor time of one look at changed counters, their file included."""
    counters = np.zeros(4, dtype=np.int64)
    state.attach_device_counters(counters)
    writer = StateWriter(state, directory)
    times = []
    for _ in range(max(repeats, 9)):
        counters += 1
        began = time.thread_time()
        writer.look()
        times.append(time.thread_time() - began)
    return round(float(np.median(times)) * 1e6, 1)


def main(
    out: Annotated[Path, typer.Option(help="JSON file to write.")],
    repeats: Annotated[int, typer.Option(help=f"{STEPS} steps each.", min=1)] = 25,
) -> None:
    """Measure the hooks and write one row a batch."""
    if find_spec("sglang") is None:
        raise typer.BadParameter("there is no SGLang here, whose steps are timed; install it first")
    if not has_nvidia_driver():  # SGLang's kernels link it
        ctypes.CDLL(str(ensure_driver_stub() / SONAME), mode=ctypes.RTLD_GLOBAL)
    from deft_backend.hosts.sglang.replayed_step import replayed_step, server_state

    core = use_one_core()
    with tempfile.TemporaryDirectory() as directory:
        look = look_microseconds(server_state(), Path(directory), repeats)
    rows = []
    for requests in REQUESTS:
        for context in CONTEXTS:
            with_hooks, without = replayed_step(requests, context)
            ours, host = microseconds(with_hooks, repeats), microseconds(without, repeats)
            row = {
                "requests": requests, "context": context, "with_hooks_us": ours,
                "without_us": host, "added_us": round(ours - host, 3),
            }  # fmt: skip
            rows.append(row)
            typer.echo(json.dumps(row))
    header = {
        **provenance(), "processor": processor(), "core": core, "repeats": repeats,
        "look_us": look, "looks_a_second": 1 / INTERVAL,
    }  # fmt: skip
    write_object(out, rows, header)


if __name__ == "__main__":
    typer.run(main)
