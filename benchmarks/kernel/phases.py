"""Split an attention's time: reduce its plan to one kernel launch at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from deft_backend.planner import Plan
from deft_backend.planner.encoding import ITEM_ORDER

STAGE_1 = ("small_tile", "large_tile", "masked_tile")
"""The kernel launches of stage 1, by tile shape."""

STAGE_2 = "reduction"


def alone(plan: Plan) -> dict[str, Plan]:
    """One plan for each kernel launch of `plan` that has items, by the launch's name.

    Run in this order, the plans give the result of `plan`: partial results stay in the workspace.
    Their times add up to more than that of `plan`, whose launches overlap.
    """
    found = {}
    nothing = {
        "reduce_query": plan.reduce_query[:0], "reduce_ptr": plan.reduce_ptr[:1],
    }  # fmt: skip
    for shape in reversed(range(len(ITEM_ORDER))):
        begin, end = plan.items_of(shape)
        if end > begin:
            # The other shapes get an empty range of items; no item changes its place.
            place = ITEM_ORDER.index(shape)
            tile_ptr = np.where(np.arange(len(plan.tile_ptr)) <= place, begin, end)
            found[STAGE_1[shape]] = replace(plan, tile_ptr=tile_ptr.astype(np.int32), **nothing)
    if len(plan.reduce_query):
        found[STAGE_2] = replace(plan, tile_ptr=np.full_like(plan.tile_ptr, plan.tile_ptr[-1]))
    return found
