"""Where an attention's time goes: its plan, cut down to one launch at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from deft_backend.planner import Plan
from deft_backend.planner.encoding import ITEM_ORDER

STAGE_1 = ("leaves", "stems", "packed")
"""Launches of stage 1, by tile shape."""

STAGE_2 = "reduction"


def alone(plan: Plan) -> dict[str, Plan]:
    """Plans of which each has one of the launches of `plan`, by name; those without work are not.

    One after the other, in the order of the launches, they compute what `plan` does: partial
    results stay in the workspace. By themselves, their times add up to more: launches of one
    attention overlap.
    """
    found = {}
    nothing = {
        "reduce_query": plan.reduce_query[:0], "reduce_ptr": plan.reduce_ptr[:1],
    }  # fmt: skip
    for shape in reversed(range(len(ITEM_ORDER))):
        begin, end = plan.items_of(shape)
        if end > begin:
            # Other shapes begin and end at the same item; no item changes its place.
            place = ITEM_ORDER.index(shape)
            tile_ptr = np.where(np.arange(len(plan.tile_ptr)) <= place, begin, end)
            found[STAGE_1[shape]] = replace(plan, tile_ptr=tile_ptr.astype(np.int32), **nothing)
    if len(plan.reduce_query):
        found[STAGE_2] = replace(plan, tile_ptr=np.full_like(plan.tile_ptr, plan.tile_ptr[-1]))
    return found
