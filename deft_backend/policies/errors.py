"""The errors that policies raise, and the limits that they keep."""

from deft_backend.policies.target import Limits, Target


class PolicyError(ValueError):
    """The policy is unknown, or it cannot work with the given parameters."""


class DoesNotFit(PolicyError):
    """The policy makes more of this batch than the plan's arrays hold."""


def check_limits(policy: str, needed: Limits, target: Target) -> None:
    """Raise DoesNotFit for more items, (item, query) pairs or KV ranges than `target` allows."""
    names = ("items", "(item, query) pairs", "KV ranges")
    for what, held, limit in zip(names, needed, target.limits, strict=True):
        if held > limit:
            raise DoesNotFit(
                f"{policy} makes {held} {what} of this batch and the plan holds {limit}; "
                "raise the plan's capacity or choose flash-decoding"
            )
