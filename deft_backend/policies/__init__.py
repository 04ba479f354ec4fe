"""Policies: rules that group KV and queries. One module each, all selectable by name."""

from deft_backend.policies.auto import Auto
from deft_backend.policies.deft_flatten import DeftFlatten
from deft_backend.policies.fasttree import FastTree
from deft_backend.policies.fixed_edges import DeftNode, DeftNodeChunk, FlashDecoding, FlashForge
from deft_backend.policies.grouping import Grouping
from deft_backend.policies.invariant import Invariant
from deft_backend.policies.policy import Policy, Rules
from deft_backend.policies.target import PolicyError, Target
from deft_backend.settings.policy_names import POLICY_NAMES

POLICIES: dict[str, Policy] = {
    policy.name: policy
    for policy in (
        FlashDecoding(),
        DeftNode(),
        DeftNodeChunk(),
        DeftFlatten(),
        FastTree(),
        FlashForge(),
        Auto(),
        Invariant(),
    )
}
"""Every policy by name, with its papers' parameters."""


def get_policy(name: str) -> Policy:
    """The policy of that name, or PolicyError with the names that exist."""
    try:
        return POLICIES[name]
    except KeyError:
        raise PolicyError(
            f"there is no policy {name!r}; expected one of {', '.join(POLICY_NAMES)}"
        ) from None


__all__ = [
    "POLICIES",
    "POLICY_NAMES",
    "Auto",
    "DeftFlatten",
    "DeftNode",
    "DeftNodeChunk",
    "FastTree",
    "FlashDecoding",
    "FlashForge",
    "Grouping",
    "Invariant",
    "Policy",
    "PolicyError",
    "Rules",
    "Target",
    "get_policy",
]
