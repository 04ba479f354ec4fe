"""The role of a policy, and the error that policies raise."""

from __future__ import annotations

from typing import Protocol

from deft_backend.forest import PrefixForest
from deft_backend.policies.grouping import Grouping
from deft_backend.policies.target import Target


class PolicyError(ValueError):
    """The policy is unknown, or it cannot work with the given parameters."""


class Policy(Protocol):
    """A rule that groups KV and queries. Policies hold parameters, never state."""

    @property
    def name(self) -> str:
        """The name by which users select the policy."""
        ...

    @property
    def several_segments(self) -> bool:
        """Whether some groups have several segments, so that their items need the masked tile."""
        ...

    @property
    def on_device(self) -> bool:
        """Whether the device planner can follow this policy."""
        ...

    def group(self, forest: PrefixForest, target: Target) -> Grouping:
        """Group `forest`'s KV with the queries that attend to it.

        Every query attends to exactly its own tokens, each once. The segment that ends a query's
        context is open, so the plan stays right when the request grows. Empty leaves have an open
        segment of no tokens for the same reason.
        """
        ...
