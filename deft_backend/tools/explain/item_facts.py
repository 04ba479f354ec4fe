"""The work items of a plan, one by one: which queries read which nodes, in which tile."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deft_backend.forest import PrefixForest
from deft_backend.planner.encoding import DIRECT, ITEM_ORDER, OPEN_END
from deft_backend.planner.plan import Plan
from deft_backend.shapes.kernel_limits import TILE_NAMES
from deft_backend.tools.explain.structure import NodesOfRanges


@dataclass(frozen=True)
class ItemFacts:
    """One work item."""

    tile: str  # the tile that computes it
    queries: tuple[int, ...]  # request indices
    tokens: int  # KV tokens that it loads
    nodes: tuple[int, ...]  # the nodes that it reads a part of
    # Whether it writes the outputs itself, so that no partial result waits for a merge.
    direct: bool


def describe_items(forest: PrefixForest, plan: Plan) -> tuple[ItemFacts, ...]:
    """Every work item of a plan, in the plan's order."""
    finder = NodesOfRanges(forest)
    is_open = plan.segment_end == OPEN_END
    end = np.where(is_open, forest.seq_lens[plan.segment_request], plan.segment_end)
    ranges = list(
        zip(plan.segment_request.tolist(), plan.segment_start.tolist(), end.tolist(),
            is_open.tolist(), strict=True)
    )  # fmt: skip
    queries, slots = plan.entry_query.tolist(), plan.entry_slot.tolist()
    segments, entries = plan.item_segment_ptr.tolist(), plan.item_query_ptr.tolist()
    found = []
    for at, shape in enumerate(ITEM_ORDER):
        for item in range(int(plan.tile_ptr[at]), int(plan.tile_ptr[at + 1])):
            read = ranges[segments[item] : segments[item + 1]]
            nodes = [node for ranged in read for node in finder.touched(*ranged)]
            own = slice(entries[item], entries[item + 1])
            found.append(
                ItemFacts(
                    tile=TILE_NAMES[shape],
                    queries=tuple(queries[own]),
                    tokens=sum(max(0, stop - start) for _, start, stop, _ in read),
                    nodes=tuple(dict.fromkeys(nodes)),
                    direct=all(slot <= DIRECT for slot in slots[own]),
                )
            )
    return tuple(found)
