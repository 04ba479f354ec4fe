"""A run of the kernel benchmark: each row is on disk before the next case begins."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.kernel.kernel_rows import Row
from benchmarks.kernel.measure_case import DeviceLost, Setup, measure
from benchmarks.kernel.methods import OURS, Method
from benchmarks.kernel.tree_workloads import Case
from benchmarks.row_files import write_rows
from deft_backend.files.provenance import driver, provenance


def rows_file(folder: Path, device: torch.device) -> Path:
    """``kernel-h200.json`` in `folder`, by the device's name."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    found = re.search(r"\b[A-Z]+\d+\w*", name.upper().replace("NVIDIA", ""))
    return folder / f"kernel-{found.group().lower() if found else name.split()[-1].lower()}.json"


def record(
    cases: Sequence[Case],
    setup: Setup,
    path: Path,
    options: dict[str, Any],
    on_row: Callable[[Row], None],
) -> list[Row]:
    """Measure every case; write rows and header after each. The last header is ``complete``.

    Raises
    ------
    DeviceLost
        If the device failed during the run; the earlier rows are on disk.
    """
    header = _header(setup, options)
    rows: list[Row] = []
    write_rows(path, rows, header)
    for row in measure(cases, setup):
        rows.append(row)
        header["runs"][0]["rows"] = len(rows)
        write_rows(path, rows, header)
        on_row(row)
    header["complete"] = True
    write_rows(path, rows, header)
    return rows


def write_policies(path: Path, rows: Sequence[Row], planner: str) -> Path:
    """Write the times of policies, measured as methods, next to the rows of `path`."""
    times = [
        {
            "set": row["set"], "tree": row["workload"], "heads": row["heads"],
            "dtype": row["kv_dtype"], "planner": planner,
            "us": {row["policy"] if name == OURS else name: us for name, us in row["us"].items()},
        }
        for row in rows
    ]  # fmt: skip
    found = path.with_name(path.name.replace("kernel-", "policies-"))
    write_rows(found, times, provenance())
    return found


def failures(rows: Sequence[Row]) -> list[str]:
    """Cases in which the result of deft is wrong or missing, or differs between two runs."""
    found = []
    for row in rows:
        case = f"{row['set']}, {row['workload']}, heads {row['heads']}"
        if OURS in row["skipped"]:
            found.append(f"{case}: {row['skipped'][OURS]}")
        elif row["repeatable"] is False:
            found.append(f"{case}: two runs of the same batch differ")
    return found


def _header(setup: Setup, options: dict[str, Any]) -> dict[str, Any]:
    came_from = provenance()
    methods: list[Method] = [setup.ours, *setup.peers]
    return {
        **came_from,
        "driver": driver() if setup.device.type == "cuda" else None,
        "methods": {method.name: method.origin() for method in methods} | setup.unavailable,
        "complete": False,
        "runs": [
            {
                "date": came_from["date"],
                "ceilings": setup.ceilings.to_dict() if setup.ceilings else None,
                "options": options,
                "rows": 0,
            }
        ],
    }


__all__ = ["DeviceLost", "failures", "record", "rows_file", "write_policies"]
