"""The policies' names, for those that read settings and import nothing else.

Hosts load the plugin in every process of every server of the machine: what is compiled, and what
compiles it, must not come along.
"""

from __future__ import annotations

POLICY_NAMES: tuple[str, ...] = (
    "flash-decoding",
    "deft-node",
    "deft-node-chunk",
    "deft-flatten",
    "fasttree",
    "flashforge",
    "auto",
)
"""What a user may ask for, in :data:`deft_backend.policies.POLICIES`."""
