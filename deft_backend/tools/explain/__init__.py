"""Explain a plan: its groups, and the bytes that it moves."""

from deft_backend.tools.explain.drawing import render
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
    "explain",
    "render",
]
