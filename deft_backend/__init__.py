"""Tree attention for LLM serving: requests that share a prefix read its KV cache once a step.

The library in five lines::

    forest = forest_from_page_tables(page_table, seq_lens, page_size)   # who shares what
    attention = TreeAttention(num_query_heads=32, num_kv_heads=8, head_dim=128,
                              dtype=torch.bfloat16, device="cuda", page_size=page_size)
    attention.plan(forest)                                              # when the batch changes
    out = attention.run(q, k_cache, v_cache, page_table, seq_lens)      # every layer, every step

Servers need none of it: ``--attention-backend deft`` is enough.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from deft_backend.settings.version import VERSION

if TYPE_CHECKING:
    from deft_backend.attention import AttentionError, TreeAttention
    from deft_backend.forest import (
        ForestError,
        PrefixForest,
        forest_from_page_tables,
        forest_from_paths,
    )
    from deft_backend.planner import Plan, PlanCapacity, PlanError
    from deft_backend.policies import POLICY_NAMES, PolicyError, Target, get_policy

__version__ = VERSION

_HOME = {
    "AttentionError": "attention",
    "ForestError": "forest",
    "POLICY_NAMES": "policies",
    "Plan": "planner",
    "PlanCapacity": "planner",
    "PlanError": "planner",
    "PolicyError": "policies",
    "PrefixForest": "forest",
    "Target": "policies",
    "TreeAttention": "attention",
    "forest_from_page_tables": "forest",
    "forest_from_paths": "forest",
    "get_policy": "policies",
}

__all__ = [
    "POLICY_NAMES",
    "AttentionError",
    "ForestError",
    "Plan",
    "PlanCapacity",
    "PlanError",
    "PolicyError",
    "PrefixForest",
    "Target",
    "TreeAttention",
    "forest_from_page_tables",
    "forest_from_paths",
    "get_policy",
]


def __getattr__(name: str) -> Any:
    """Import on first use: the command line and servers that do not use us start without torch."""
    if name in _HOME:
        return getattr(import_module(f"deft_backend.{_HOME[name]}"), name)
    raise AttributeError(f"module 'deft_backend' has no attribute {name!r}")
