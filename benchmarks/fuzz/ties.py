"""Whether two plans differ by a tie: at slightly other costs, the reference makes both.

The reference decides in float64, the device planner in float32. If two choices cost the same up
to float32's rounding, each planner may take another one. Both plans are right then, and equally
good. So the reference plans again with costs that differ by no more than such a rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from deft_backend.costs import CostModel
from deft_backend.forest import PrefixForest
from deft_backend.planner import Plan, PlanCapacity, plan_forest
from deft_backend.policies import Target, get_policy
from deft_backend.settings.policy_names import AUTO

ROUNDING = 3e-5
"""Largest change of a cost, as a share of it. A plan's cost in float32 is rounded by some 1e-7 of
the whole sum. If two choices differ only in a small term of the sum, such as the price of partial
results, that term must change by more to have the same effect. No measured cost is that exact."""

TRIALS = 64


def is_tie(
    forest: PrefixForest, target: Target, capacity: PlanCapacity, same: Callable[[Plan], bool]
) -> bool:
    """Whether the reference makes a plan that is the `same` for some costs close to its own."""
    policy = get_policy(AUTO)
    return any(
        same(plan_forest(forest, policy, near, capacity)[0]) for near in nearby_targets(target)
    )


def nearby_targets(target: Target) -> Iterator[Target]:
    """Targets whose costs differ by at most :data:`ROUNDING`; always the same ones."""
    random = np.random.default_rng(0)
    for _ in range(TRIALS):
        factors = 1 + ROUNDING * random.uniform(-1, 1, size=7)
        yield replace(target, cost_model=_scaled(target.costs, factors.tolist()))


def _scaled(model: CostModel, factors: list[float]) -> CostModel:
    tiles = model.tiles
    partial, reduce, bandwidth, *others = factors
    item, token = others[:2], others[2:]
    return replace(
        model,
        bandwidth_gb_s=model.bandwidth_gb_s * bandwidth,
        tiles=replace(
            tiles,
            item_ns=tuple(time * by for time, by in zip(tiles.item_ns, item, strict=True)),
            token_ns=tuple(time * by for time, by in zip(tiles.token_ns, token, strict=True)),
            partial_ns=tiles.partial_ns * partial,
            reduce_ns=tiles.reduce_ns * reduce,
        ),
    )
