"""Finds the costs that `auto` plans best with, by the times of its plans."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from deft_backend.costs import CostModel
from deft_backend.tools.tuning.trials import Trials, mean_ratio

FACTORS = (0.5, 0.7, 1.45, 2.0)  # each cost is tried at these multiples of its present value

LEAST_GAIN = 0.001  # A change that gains less than this share of the time may be noise


@dataclass(frozen=True, eq=False)
class SearchResult:
    """The best costs of a search."""

    model: CostModel
    ratio: float  # Geometric mean of the times over those of the first start; at most 1
    start: int  # Index of the start that the best costs come from
    plans: int  # Different plans that were measured
    batches: int  # Batches that each table was compared on


def search(trials: Trials, starts: Sequence[CostModel]) -> SearchResult:
    """The costs with the shortest times, from the best of `starts` on, one cost at a time.

    The first start is the table in use. The search leaves it only for costs whose plans are faster
    by :data:`LEAST_GAIN` in the geometric mean.
    """
    before = trials.times_us(starts[0])

    def ratio_of(model: CostModel) -> float:
        return mean_ratio(trials.times_us(model), before)

    best, ratio, start = starts[0], 1.0, 0
    for index, model in enumerate(starts):
        measured = ratio_of(model)
        if measured < ratio - LEAST_GAIN:
            best, ratio, start = model, measured, index
    improved = True
    while improved:
        improved = False
        for model in _neighbours(best):
            measured = ratio_of(model)
            if measured < ratio - LEAST_GAIN:
                best, ratio, improved = model, measured, True
    return SearchResult(best, ratio, start, trials.plans, len(trials.names))


def _neighbours(model: CostModel) -> Iterator[CostModel]:
    """The model with one cost of `auto` changed."""
    tiles = model.tiles
    for factor in FACTORS:
        for shape in range(len(tiles.item_ns)):
            item_ns = _scaled(tiles.item_ns, shape, factor)
            yield replace(model, tiles=replace(tiles, item_ns=item_ns))
            token_ns = _scaled(tiles.token_ns, shape, factor)
            yield replace(model, tiles=replace(tiles, token_ns=token_ns))
        yield replace(model, tiles=replace(tiles, partial_ns=tiles.partial_ns * factor))
        yield replace(model, tiles=replace(tiles, reduce_ns=tiles.reduce_ns * factor))


def _scaled(values: tuple[float, ...], at: int, factor: float) -> tuple[float, ...]:
    return (*values[:at], values[at] * factor, *values[at + 1 :])
