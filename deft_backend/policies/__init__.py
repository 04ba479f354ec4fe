"""Policies: rules that group KV and queries. One module each, all selectable by name."""

from deft_backend.policies.auto import Auto
from deft_backend.policies.chunk_choice import CHUNK_RULES
from deft_backend.policies.deft_flatten import DeftFlatten
from deft_backend.policies.fasttree import FastTree
from deft_backend.policies.fixed_edges import DeftNode, DeftNodeChunk, FlashDecoding, FlashForge
from deft_backend.policies.grouping import Grouping
from deft_backend.policies.invariant import Invariant
from deft_backend.policies.policy import ABSOLUTE, EDGE_RULES, FLATTENED, Policy, Rules
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


_WITH_PARAMETERS: dict[str, type[Policy]] = {
    "greedy": FastTree,
    FLATTENED: DeftFlatten,
    ABSOLUTE: Invariant,
}
"""Rules that take the parameters of a policy."""


def check_served(policy: Policy) -> None:
    """Raise PolicyError, in one line, for a policy that no server can run."""
    rules = policy.rules
    if rules is None:
        reason = "it has no rules for the device planner"
    elif rules.edges not in EDGE_RULES or rules.chunks not in (*CHUNK_RULES, ABSOLUTE):
        reason = f"the device planner does not know its rules ({rules.edges}, {rules.chunks})"
    else:
        for rule in (rules.edges, rules.chunks):
            owner = _WITH_PARAMETERS.get(rule, Policy)
            if not isinstance(policy, owner):
                reason = f"the rule {rule} needs a class derived from {owner.__name__}"
                break
        else:
            return
    raise PolicyError(f"no server runs policy {policy.name}: {reason}")


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
    "check_served",
    "get_policy",
]
