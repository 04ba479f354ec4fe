"""Hardware counters of one attention: bytes from DRAM, and the use of SMs and memory, by `ncu`.

For FlashForge's Figure 6 and DeFT's Table 14. Each method runs in a process of its own under
NVIDIA Nsight Compute, which replays each kernel with an empty cache.
"""

from __future__ import annotations

import csv
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

METRICS = {
    "dram__bytes_read.sum": "dram_read_bytes",
    "l1tex__m_xbar2l1tex_read_bytes.sum": "l2_read_bytes",  # from the L2 to the SMs
    "gpu__time_duration.sum": "time_ns",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "sm_percent",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_percent",
}
TREES = ("1,64 4000,1", "1,2 120000,512", "1,16 120000,512", "1,64 120000,512")
METHODS = ("flash-decoding", "deft-node", "deft-flatten", "flashforge", "auto")
SECONDS = 120


class NoCountersError(RuntimeError):
    """`ncu` is missing, or it could not read the counters."""


def counted(method: str, tree: str, heads: str) -> dict[str, Any]:
    """The counters of one attention, summed over its kernels; percentages weighted by time.

    Raises
    ------
    NoCountersError
        If `ncu` is not installed, or reads nothing.
    """
    tool = shutil.which("ncu")
    if tool is None:
        raise NoCountersError("ncu is not on the PATH; it comes with CUDA's toolkit")
    options = "--csv --print-units base --profile-from-start off --clock-control none --metrics"
    program = [sys.executable, "-m", "benchmarks.papers.one_launch", method, tree, heads]
    command = [tool, *options.split(), ",".join(METRICS), *program]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, env=dict(os.environ), check=False
    )
    rows = summed(done.stdout.splitlines())
    if not rows["kernels"]:
        said = (done.stdout + done.stderr).strip().splitlines()
        raise NoCountersError(f"ncu read no kernel: {said[-1] if said else 'no output'}")
    return {"method": method, "tree": tree, "heads": heads, **rows}


def summed(lines: Sequence[str]) -> dict[str, Any]:
    """Sums over all kernels of `ncu`'s CSV; lines before its header are the program's own."""
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    kernels: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(lines[start:]):
        if name := METRICS.get(row.get("Metric Name") or ""):
            value = float(row["Metric Value"].replace(",", ""))
            kernels.setdefault(row["ID"], {})[name] = value
    time = sum(kernel.get("time_ns", 0.0) for kernel in kernels.values())
    found: dict[str, Any] = {"kernels": len(kernels), "time_us": round(time / 1e3, 2)}
    for name in ("dram_read_bytes", "l2_read_bytes"):
        found[name] = int(sum(kernel.get(name, 0.0) for kernel in kernels.values()))
    for name in ("sm_percent", "dram_percent"):
        weighted = sum(k.get(name, 0.0) * k.get("time_ns", 0.0) for k in kernels.values())
        found[name] = round(weighted / time, 2) if time else None
    return found
