"""``python -m benchmarks step-hooks``: CPU time that the plugin adds to a replayed decode step.

SGLang must be installed; no GPU is needed. The plugin's real device-planned backend and its real
fence for page tables run on one core, around a host that does nothing. So only the plugin's time
remains. A replayed step calls nothing else of the plugin. Two effects are not measured. The plugin
saves time because the host prepares no metadata, and the fence waits on a GPU. ``look_us`` is the
CPU time in which the writer thread writes the server's state once. The thread does so
`looks_a_second` times a second.
"""

from __future__ import annotations

import ctypes
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.planning.host_planning import processor, use_one_core
from benchmarks.row_files import write_rows
from deft_backend.files.provenance import provenance
from deft_backend.telemetry.state import INTERVAL, ServerState, StateWriter
from deft_backend.tools.servers.driver_stub import SONAME, ensure_driver_stub, has_nvidia_driver

REQUESTS = (2, 32, 256, 1024)
CONTEXTS = (2048, 65536)
STEPS = 1000
"""Steps timed as one block; reading the clock would distort the time of a single step."""


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
    """Median CPU time of one look at changed counters, including the write of their file."""
    counters = np.zeros(4, dtype=np.int64)
    state.on_device.attach(counters)
    writer = StateWriter(state, directory)
    times = []
    for _ in range(max(repeats, 9)):
        counters += 1
        began = time.thread_time()
        writer.look()
        times.append(time.thread_time() - began)
    return round(float(np.median(times)) * 1e6, 1)


def measure_hooks(
    out: Path, repeats: int, on_row: Callable[[dict[str, Any]], None] = lambda row: None
) -> None:
    """Time the hooks for each batch size and context length, and write the rows.

    Parameters
    ----------
    out : Path
        JSON file to write.
    repeats : int
        Timed blocks of :data:`STEPS` steps.
    on_row : callable
        Called with each row when it is measured.

    Raises
    ------
    RowsError
        If `out` cannot be written.
    """
    if not has_nvidia_driver():  # SGLang's kernels link the driver's library
        ctypes.CDLL(str(ensure_driver_stub() / SONAME), mode=ctypes.RTLD_GLOBAL)
    from benchmarks.step_hooks.replayed_step import replayed_step, server_state

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
            on_row(row)
    header = {
        **provenance(), "processor": processor(), "core": core, "repeats": repeats,
        "look_us": look, "looks_a_second": 1 / INTERVAL,
    }  # fmt: skip
    write_rows(out, rows, header)
