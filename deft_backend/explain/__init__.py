"""Explain a plan: its groups, and the bytes that it moves."""

from deft_backend.explain.drawing import render
from deft_backend.explain.explanation import ChunkFacts, Explanation, NodeFacts, explain
from deft_backend.explain.loads import PlanLoads, count_plan_loads

__all__ = [
    "ChunkFacts",
    "Explanation",
    "NodeFacts",
    "PlanLoads",
    "count_plan_loads",
    "explain",
    "render",
]
