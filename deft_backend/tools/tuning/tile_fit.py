"""Fit TileCosts, the costs of items and partial results, to measured launches."""

from collections.abc import Callable

from deft_backend.costs.tile_costs import TileCosts
from deft_backend.policies import Target
from deft_backend.shapes.kernel_limits import TILE_NAMES
from deft_backend.tools.tuning.grids import Grid
from deft_backend.tools.tuning.least_squares import fit_differences, fit_times
from deft_backend.tools.tuning.machine import Work

SMALLEST_NS = 1e-3  # least cost in nanoseconds: no fit may give 0


def used_shapes(target: Target) -> dict[int, int]:
    """Queries of a typical group for each tile shape of one range: one for a leaf, or a whole tile.

    A shape is absent if its height is below the query heads of a GQA group: no plan uses it.
    """
    used = [shape for shape, held in enumerate(target.single_range_tiles) if held > 0]
    return {s: 1 if s == used[0] else target.single_range_tiles[s] for s in used}


def measure_tile_costs(
    time_us: Callable[[Work], float], target: Target, grid: Grid
) -> tuple[TileCosts, dict[str, float]]:
    """Measure and fit; also return the fits' errors (relative, root of the mean square).

    - Items: ``k`` groups a program, of ``n`` tokens each, take ``launch + k (item + n token)``.
      Their KV stays in the L2 cache; the cost of memory is counted separately, by its bandwidth.
    - Partial results: the same items once whole contexts, once chunks of contexts. The launch of
      chunks takes ``reduce + results · partial`` more.
    """
    fitted, errors = {}, {}
    features: list[tuple[float, ...]]
    for shape, queries in used_shapes(target).items():
        programs = target.tile_programs[shape]
        features, times = [], []
        for tokens in grid.tile_tokens:
            for rounds in grid.tile_rounds:
                work = Work(rounds * programs, queries, tokens, resident=True)
                features.append((1.0, rounds, rounds * tokens))
                times.append(time_us(work) * 1e3)
        (_, item, token), errors[TILE_NAMES[shape]] = fit_times(features, times)
        fitted[shape] = (_positive(item), _positive(token))
    # An unused shape needs values, but nothing reads them.
    shapes = [fitted.get(shape, fitted[min(fitted)]) for shape in range(max(fitted) + 1)]

    features, more, scale = [], [], []
    for whole, parts in result_works(target, grid):
        alone, together = time_us(whole) * 1e3, time_us(parts) * 1e3
        features.append((1.0, parts.results))
        more.append(together - alone)
        scale.append(together)
    (reduce, partial), errors["partial results"] = fit_differences(features, more, scale)
    item_ns, token_ns = zip(*shapes, strict=True)
    costs = TileCosts(item_ns, token_ns, _positive(partial), _positive(reduce))
    return costs, errors


def result_works(target: Target, grid: Grid) -> list[tuple[Work, Work]]:
    """Equal launches without and with partial results, for few and for many results."""
    step = max(grid.result_parts)
    works: dict[Work, Work] = {}
    typical = list(used_shapes(target).values())
    for queries in (typical[0], typical[-1]):
        for count in grid.result_counts:
            groups = max(step, count // queries // step * step)
            for parts in grid.result_parts:
                work = Work(groups, queries, target.block_tokens, parts, resident=True)
                works[work] = Work(groups, queries, target.block_tokens, resident=True)
    return [(whole, parts) for parts, whole in works.items()]


def _positive(value: float) -> float:
    return max(SMALLEST_NS, float(f"{value:.4g}"))
