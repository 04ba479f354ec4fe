"""The policies' names, for the policies and for modules that must not import them.

Hosts load the plugin in every process of every server on the machine. Importing the policies would
load a compiler into all of them.
"""

FLASH_DECODING = "flash-decoding"
DEFT_NODE = "deft-node"
DEFT_NODE_CHUNK = "deft-node-chunk"
DEFT_FLATTEN = "deft-flatten"
FASTTREE = "fasttree"
FLASHFORGE = "flashforge"
AUTO = "auto"
INVARIANT = "invariant"

POLICY_NAMES: tuple[str, ...] = (
    FLASH_DECODING,
    DEFT_NODE,
    DEFT_NODE_CHUNK,
    DEFT_FLATTEN,
    FASTTREE,
    FLASHFORGE,
    AUTO,
    INVARIANT,
)
"""The names by which users select a policy of :data:`deft_backend.policies.POLICIES`."""
