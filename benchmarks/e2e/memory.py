"""Memory of a running server, on the machine and on its GPUs."""

from __future__ import annotations

import subprocess
from typing import Any


def memory_of(pid: int | None) -> dict[str, float | None]:
    """Resident memory of a process and its descendants, and used memory of all GPUs, in MiB.

    The GPU figure counts every process. None if this machine does not report it.
    """
    return {"rss_mib": _resident(pid), "gpu_mib": _on_gpus()}


def growth(samples: list[dict[str, Any]]) -> dict[str, float | None]:
    """Growth of the memory from the first third of the samples to the last sample, in MiB.

    The first third is left out, because pools, caches and arenas reach their size then.
    """
    found: dict[str, float | None] = {}
    for name in ("rss_mib", "gpu_mib"):
        values = [sample[name] for sample in samples if sample[name] is not None]
        grown = values[-1] - values[len(values) // 3] if len(values) > 1 else None
        found[name] = None if grown is None else round(grown, 1)
    return found


def _resident(pid: int | None) -> float | None:
    try:
        import psutil
    except ImportError:
        return None
    try:
        root = psutil.Process(pid)
        processes = [root, *root.children(recursive=True)]
    except psutil.Error:
        return None
    total = 0
    for process in processes:
        try:
            total += process.memory_info().rss
        except psutil.Error:  # the process has just ended
            continue
    return round(total / 2**20, 1)


def _on_gpus() -> float | None:
    try:
        said = subprocess.run(
            ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"],
            capture_output=True, text=True, check=True, timeout=30,
        ).stdout  # fmt: skip
        return float(sum(int(line) for line in said.split()))
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
