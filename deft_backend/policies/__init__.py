"""Policies: how KV and queries are grouped. One module each, all selectable by name."""

from deft_backend.policies.base import (
    Grouping,
    GroupingBuilder,
    Policy,
    PolicyError,
    Segment,
    Target,
)

__all__ = ["Grouping", "GroupingBuilder", "Policy", "PolicyError", "Segment", "Target"]
