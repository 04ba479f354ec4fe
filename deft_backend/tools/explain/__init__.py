"""Explain a plan: its groups, and the bytes that it moves."""

from deft_backend.tools.explain.drawing import render
from deft_backend.tools.explain.explanation import ChunkFacts, Explanation, NodeFacts, explain
from deft_backend.tools.explain.loads import PlanLoads, count_plan_loads
from deft_backend.tools.explain.token_tree_drawing import (
    draw_token_tree,
    seen_from_bits,
    seen_from_parents,
)

__all__ = [
    "ChunkFacts",
    "Explanation",
    "NodeFacts",
    "PlanLoads",
    "count_plan_loads",
    "draw_token_tree",
    "explain",
    "render",
    "seen_from_bits",
    "seen_from_parents",
]
