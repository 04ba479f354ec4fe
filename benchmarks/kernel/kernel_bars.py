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

CHAINS_ALONE = 0.98
CHAINS_SHARED = 3.0
"""Times of FlashAttention-3 that verification of chains must reach: alone, and for 64 requests that
share 16,384 tokens. Other shared chains and all token trees must be faster than every peer."""

_SHARES = 1.01
_HOST_KERNELS = ("fa3", "flashinfer")


def is_met(row: Row) -> bool | None:
    """Whether a case reaches its bar; None if there is nothing to compare with."""
    if row.get("query_tokens", 1) > 1:
        return _verifies_fast(row)
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


def _verifies_fast(row: Row) -> bool | None:
    """The bar of a case of several query tokens."""
    ours, theirs = row["us"].get(OURS), row["us"].get("fa3")
    if row.get("mask") == "tree":
        ratio = speed_up(row)
        return None if ratio is None else ratio > 1
    if theirs is None:
        return None
    bar = CHAINS_ALONE if row["share"] < _SHARES else 1.0
    if row.get("query_tokens", 1) >= 4 and "64 on 16384" in row["workload"]:
        bar = CHAINS_SHARED
    return ours is not None and theirs / ours >= bar


def mean_is_met(rows: Sequence[Row]) -> bool | None:
    """Whether the rows of one set and head shape reach its mean; None if they have no such bar."""
    asked = MEANS.get(rows[0]["set"]) if rows and rows[0]["heads"] == MAIN_HEADS else None
    mean = geometric_mean(of_roof(row) for row in rows)
    return None if asked is None or mean is None else mean >= asked
