"""The rule ``scheduled`` of `flashforge`: the least makespan (FlashForge, section 5)."""

import numpy as np

from deft_backend.costs.cost_model import FloatArray
from deft_backend.policies.edges import Int64Array

LEVELS = 64  # costs for which :func:`makespan` counts items that take at least as long

LEVEL = 0.96  # ratio of neighbouring costs there


def estimate(
    tokens: Int64Array | FloatArray, knots: FloatArray, at_knots: FloatArray
) -> FloatArray:
    """``C_est`` of items of so many tokens: linear between the knots and beyond them."""
    cell = np.clip(np.searchsorted(knots, tokens, side="right") - 1, 0, len(knots) - 2)
    rise = (at_knots[cell + 1] - at_knots[cell]) / (knots[cell + 1] - knots[cell])
    time: FloatArray = np.maximum(1.0, at_knots[cell] + (tokens - knots[cell]) * rise)
    return time


def makespan(slices: FloatArray, items: Int64Array, programs: int) -> float:
    """Least time of items on `programs` programs that no schedule can beat, as far as known.

    It is the largest of three bounds. Programs work at least their mean (FlashForge, equation 4).
    The longest item runs on one program. If ``k`` items take at least ``c`` each, some program
    works ``ceil(k / programs)`` of them; ``c`` takes the values ``longest * LEVEL ** j``.
    Longest-first scheduling stays close to these bounds; the plan's items are in that order.

    `slices` [R] are nanoseconds of each item of a range, `items` [R] the range's items.
    """
    ascending = np.argsort(slices)
    longest = slices[ascending[-1]]
    levels = longest * LEVEL ** np.arange(LEVELS)
    below = np.searchsorted(slices[ascending], levels)  # ranges that take less
    at_least = items.sum() - np.append(0, np.cumsum(items[ascending]))[below]
    counted = (-(-at_least // programs) * levels).max()
    return float(max(slices @ items / programs, longest, counted))
