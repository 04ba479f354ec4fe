"""Least squares over coefficients that cannot be negative."""

from itertools import combinations

import numpy as np
import numpy.typing as npt

from deft_backend.costs.cost_model import FloatArray


def fit_times(features: npt.ArrayLike, times: npt.ArrayLike) -> tuple[FloatArray, float]:
    """Coefficients of 0 or more that bring ``features @ coefficients`` closest to `times`.

    The fit weighs relative errors: a launch of 10 µs counts as much as one of 1 ms.

    - `features` [M, N], `times` [M] above 0

    Returns the coefficients [N] float64, 0 for a term that the measurements contradict, and the
    root of the mean squared relative error.
    """
    measured = np.asarray(times, dtype=np.float64)
    matrix = np.asarray(features, dtype=np.float64) / measured[:, None]
    ones = np.ones(len(measured))
    return _non_negative(matrix, ones)


def fit_differences(
    features: npt.ArrayLike, differences: npt.ArrayLike, scale: npt.ArrayLike
) -> tuple[FloatArray, float]:
    """Like :func:`fit_times`, for differences of times; `scale` holds the times themselves."""
    of = np.asarray(scale, dtype=np.float64)
    matrix = np.asarray(features, dtype=np.float64) / of[:, None]
    return _non_negative(matrix, np.asarray(differences, dtype=np.float64) / of)


def _non_negative(matrix: FloatArray, goal: FloatArray) -> tuple[FloatArray, float]:
    """The best solution without a negative coefficient, over all sets of columns.

    This is the constrained optimum: on its own columns it equals the unconstrained optimum. A few
    columns have few sets.
    """
    size = np.linalg.norm(matrix, axis=0)
    scaled = matrix / np.where(size > 0.0, size, 1.0)
    best: FloatArray = np.zeros(matrix.shape[1])
    least = float(np.linalg.norm(goal))
    for count in range(1, matrix.shape[1] + 1):
        for columns in combinations(range(matrix.shape[1]), count):
            chosen = list(columns)
            solution, *_ = np.linalg.lstsq(scaled[:, chosen], goal, rcond=None)
            error = float(np.linalg.norm(scaled[:, chosen] @ solution - goal))
            if (solution >= 0.0).all() and error < least * (1.0 - 1e-9):
                least = error
                best = np.zeros(matrix.shape[1])
                best[chosen] = solution
    coefficients: FloatArray = best / np.where(size > 0.0, size, 1.0)
    return coefficients, least / float(np.sqrt(len(goal)))
