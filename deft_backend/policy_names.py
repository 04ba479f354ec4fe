"""The policies' names, for modules that must not import the policies themselves.

Hosts load the plugin in every process of every server on the machine. Importing the policies would
load a compiler into all of them.
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
"""The names by which users select a policy of :data:`deft_backend.policies.POLICIES`."""
