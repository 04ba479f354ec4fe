"""The errors that policies raise, and the limits that they keep."""

from deft_backend.policies.target import Target


class PolicyError(ValueError):
    """The policy is unknown, or it cannot work with the given parameters."""


class DoesNotFit(PolicyError):
    """The policy makes more of this batch than the plan's arrays hold."""


def check_limits(policy: str, items: int, entries: int, segments: int, target: Target) -> None:
    """Raise DoesNotFit for more items, (item, query) pairs or KV ranges than `target` allows."""
    for what, held, limit in (
        ("items", items, target.max_items),
        ("(item, query) pairs", entries, target.max_entries),
        ("KV ranges", segments, target.max_segments),
    ):
        if held > limit:
            raise DoesNotFit(
                f"{policy} makes {held} {what} of this batch and the plan holds {limit}; "
                "raise the plan's capacity or choose flash-decoding"
            )
