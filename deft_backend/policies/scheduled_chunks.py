"""The rule ``scheduled`` of `flashforge`: the least makespan (FlashForge, section 5)."""

import numpy as np

from deft_backend.compile.host_jit import host_jit
from deft_backend.costs.cost_model import FloatArray
from deft_backend.policies.edges import Int64Array

LEVELS = 64  # costs for which :func:`makespan` counts items that take at least as long

LEVEL = 0.96  # ratio of neighbouring costs there


@host_jit
def estimate(tokens: float, knots: FloatArray, at_knots: FloatArray) -> float:
    """``C_est`` of an item of so many tokens: linear between the knots and beyond them."""
    cell = 0
    while cell + 2 < len(knots) and knots[cell + 1] <= tokens:
        cell += 1
    rise = (at_knots[cell + 1] - at_knots[cell]) / (knots[cell + 1] - knots[cell])
    time: float = max(1.0, at_knots[cell] + (tokens - knots[cell]) * rise)
    return time


@host_jit
def makespan(slices: FloatArray, items: Int64Array, programs: int) -> float:
    """Least time of items on `programs` programs that no schedule can beat, as far as known.

    It is the largest of three bounds. Programs work at least their mean (FlashForge, equation 4).
    The longest item runs on one program. If ``k`` items take at least ``c`` each, some program
    works ``ceil(k / programs)`` of them; ``c`` takes the values ``longest * LEVEL ** j``.
    Longest-first scheduling stays close to these bounds; the plan's items are in that order.

    `slices` [R] are nanoseconds of each item of a range, `items` [R] the range's items.
    """
    mean = 0.0
    longest = 0.0
    for r in range(len(slices)):
        mean += slices[r] * items[r]
        longest = max(longest, slices[r])
    bound = max(mean / programs, longest)
    level = longest
    for _ in range(LEVELS):
        at_least = np.int64(0)
        for r in range(len(slices)):
            if slices[r] >= level:
                at_least += items[r]
        bound = max(bound, (at_least + programs - 1) // programs * level)
        level *= LEVEL
    return bound
