"""The figures that a release must reach, case by case."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.kernel.kernel_rows import Row, geometric_mean, of_roof, speed_up
from benchmarks.kernel.methods import OURS

SPEED_UP = 1.15
NEAR_ROOF = 0.8
UNSHARED = 0.97
MAIN_HEADS = "32/8"
MEANS = {"fasttree": 0.45, "deft": 0.35}
"""Geometric means of roof ÷ time that the sets must reach with :data:`MAIN_HEADS`."""

_SHARES = 1.01
_HOST_KERNELS = ("fa3", "flashinfer")


def is_met(row: Row) -> bool | None:
    """Whether a case reaches its bar; None if there is nothing to compare with."""
    ours = row["us"].get(OURS)
    if row["share"] < _SHARES:
        times = [us for name in _HOST_KERNELS if (us := row["us"].get(name)) is not None]
        return None if not times else ours is not None and min(times) / ours >= UNSHARED
    peers = [us for name, us in row["us"].items() if name != OURS and us is not None]
    if not peers:
        return None
    ratio = speed_up(row)
    if ratio is None:
        return False
    if row["heads"] != MAIN_HEADS:
        return ratio > 1
    return ratio >= SPEED_UP or (ratio > 1 and (of_roof(row) or 0) >= NEAR_ROOF)


def mean_is_met(rows: Sequence[Row]) -> bool | None:
    """Whether the rows of one set and head shape reach its mean; None if they have no such bar."""
    asked = MEANS.get(rows[0]["set"]) if rows and rows[0]["heads"] == MAIN_HEADS else None
    mean = geometric_mean(of_roof(row) for row in rows)
    return None if asked is None or mean is None else mean >= asked
