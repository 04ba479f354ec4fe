"""How many CPUs this process may use, by its affinity and by the quotas of its container."""

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path


def usable_cpus(root: Path = Path("/")) -> int:
    """CPUs that this process may keep busy: at least 1, and a part of a CPU counts as one.

    `root` holds ``proc`` and ``sys``. A file that cannot be read sets no limit. Source: cgroups(7).
    """
    cpus = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cpus = len(os.sched_getaffinity(0))
    return max(1, math.ceil(min([cpus, *_quotas(root)])))


def _quotas(root: Path) -> Iterator[float]:
    """The CPUs that each control group of this process may use, for groups of both versions."""
    groups = []
    with contextlib.suppress(OSError):
        # A group's name may be any bytes.
        groups = os.fsdecode((root / "proc/self/cgroup").read_bytes()).splitlines()
    for group in groups:
        _, controllers, path = [*group.split(":", 2), "", ""][:3]
        if controllers == "":
            mount, names = root / "sys/fs/cgroup", ["cpu.max"]
        elif "cpu" in controllers.split(","):
            mount, names = root / "sys/fs/cgroup/cpu", ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
        else:
            continue
        # In a container the mount may be the process's own group, while `path` is the machine's.
        folder = mount / path.lstrip("/")
        for each in (folder, *folder.parents):
            with contextlib.suppress(OSError, ValueError):  # ValueError: "max"
                quota, period = (
                    int(word) for name in names for word in (each / name).read_text().split()
                )
                if quota > 0:  # -1: no quota
                    yield quota / period
            if each == mount:
                break
