"""Explain a plan: its groups, and the bytes that it moves."""

from deft_backend.tools.explain.drawing import (
    draw_token_tree,
    render,
    seen_from_parents,
)
from deft_backend.tools.explain.explanation import (
    Explanation,
    PlanLoads,
    count_plan_loads,
    explain,
)
from deft_backend.tools.explain.structure import ChunkFacts, NodeFacts

__all__ = [
    "ChunkFacts",
    "Explanation",
    "NodeFacts",
    "PlanLoads",
    "count_plan_loads",
    "draw_token_tree",
    "explain",
    "render",
    "seen_from_parents",
]
