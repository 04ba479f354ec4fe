"""FastTree's alpha, beta and gamma: its cost equations fitted to measured groups."""

import logging
from collections.abc import Callable

from deft_backend.costs import FastTreeCoefficients
from deft_backend.policies import Target
from deft_backend.tools.tuning.grids import Grid
from deft_backend.tools.tuning.least_squares import fit_times
from deft_backend.tools.tuning.machine import Work

logger = logging.getLogger(__name__)

ARTIFACT = FastTreeCoefficients(alpha=0.66, beta=0.33, gamma=0.1)
"""Defaults of FastTree's published artifact (kernel_bench/fasttree.py)."""

WORST_FIT = 0.5  # relative error above which the equations do not describe the measurements

LEAST_WEIGHT = 1e-3  # of padding over useful work; below it, padding has no weight

ROUNDS = 2  # groups for each program in the measured launches


def pad(tile: int, size: int) -> int:
    """``Pad(TS, N) = TS - ((N - 1) % TS + 1)``: padding elements of the last tile."""
    return tile - ((size - 1) % tile + 1)


def query_padding_cost(tile_queries: int, num_queries: int, length: int, head_dim: int) -> int:
    """``C_{P,q}(nQ, len) = Pad(TS_q, nQ) · len · d``."""
    return pad(tile_queries, num_queries) * length * head_dim


def context_padding_cost(tile_tokens: int, num_queries: int, length: int, head_dim: int) -> int:
    """``C_{P,c}(nQ, len) = nQ · Pad(TS_c, min(len, TS_c)) · d``."""
    return num_queries * pad(tile_tokens, min(length, tile_tokens)) * head_dim


def measure_coefficients(
    time_us: Callable[[Work], float], target: Target, grid: Grid
) -> tuple[FastTreeCoefficients, float]:
    """Fit the weights of padding and of intermediate results, with the fit's relative error.

    Both values of an edge attend to the same tokens; they differ only in padding and intermediate
    results. So the fit describes the time of a launch of groups with ``nQ`` query vectors and
    ``len`` tokens as::

        launch + [reduction] + u_t · nQ · len · d
            + alpha · C_{P,q} + beta · C_{P,c} + [gamma · queries · d]

    The terms in brackets apply if there are intermediate results. Each phase has its own ``u_t``,
    because small tiles wait for memory more than large tiles. Only the ratios of the weights decide
    an edge. The fit scales them so that the weights of padding have the same sum as the artifact's.
    A weight of 0 is a result: kernels with small KV blocks lose nothing to padded contexts. If the
    fit is poor, or padding has no weight, the artifact's defaults are used, and the log says so.
    """
    works = group_works(target, grid)
    features = [_features(work, target) for work in works]
    fitted, error = fit_times(features, [time_us(work) for work in works])
    alpha, beta, gamma = (float(value) for value in fitted[-3:])
    if error > WORST_FIT or alpha + beta <= LEAST_WEIGHT * max(fitted[2:-3]):
        logger.warning(
            "deft: FastTree's cost equations fit this GPU poorly (alpha %.3g, beta %.3g, gamma "
            "%.3g, relative error %.0f %%); the defaults of its artifact are kept",
            alpha, beta, gamma, error * 100,
        )  # fmt: skip
        return ARTIFACT, error
    scale = (ARTIFACT.alpha + ARTIFACT.beta) / (alpha + beta)
    weights = (float(f"{value * scale:.4g}") for value in (alpha, beta, gamma))
    return FastTreeCoefficients(*weights), error


def group_works(target: Target, grid: Grid) -> list[Work]:
    """Groups with padding in none, one or both dimensions, with and without partial results."""
    works: dict[Work, None] = {}
    below = 0
    for queries, programs in zip(target.single_range_tiles, target.tile_programs, strict=False):
        if queries == 0:
            continue
        # The tile of this phase with most padding, and the tile with least.
        for filled in (min(below + 1, queries), queries):
            for blocks in grid.fasttree_blocks:
                tokens = max(1, round(blocks * target.block_tokens))
                for parts in (1, 2):
                    works[Work(ROUNDS * programs, filled, tokens, parts)] = None
        below = queries
    return list(works)


def _features(work: Work, target: Target) -> list[float]:
    rows, dim = work.queries * target.gqa_group, target.head_dim
    groups = work.groups * target.num_kv_heads
    phases = target.phases
    phase = next((each for each in phases if rows <= each[0]), phases[-1])
    tile_queries, tile_tokens = phase
    partial = work.parts > 1
    useful = groups * rows * work.tokens * dim
    return [
        1.0,
        float(partial),
        *(float(useful * (other == phase)) for other in phases),
        float(groups * query_padding_cost(tile_queries, rows, work.tokens, dim)),
        float(groups * context_padding_cost(tile_tokens, rows, work.tokens, dim)),
        float(groups * work.queries * dim * partial),
    ]
