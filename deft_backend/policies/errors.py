"""The error that policies raise, and the limits that they keep."""

from deft_backend.policies.target import Target


class PolicyError(ValueError):
    """The policy is unknown, or it cannot work with the given parameters."""


def check_limits(policy: str, groups: int, pairs: int, target: Target) -> None:
    """Refuse more groups or (group, query) pairs than `target` allows."""
    for what, held, limit in (
        ("groups", groups, target.max_groups),
        ("(group, query) pairs", pairs, target.max_group_queries),
    ):
        if held > limit:
            raise PolicyError(
                f"{policy} makes {held} {what} of this batch and the plan holds {limit}; "
                "raise the plan's capacity or choose flash-decoding"
            )
