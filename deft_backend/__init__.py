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
    from deft_backend.attention import AttentionError as AttentionError
    from deft_backend.attention import TreeAttention as TreeAttention
    from deft_backend.forest import ForestError as ForestError
    from deft_backend.forest import PrefixForest as PrefixForest
    from deft_backend.forest import forest_from_page_tables as forest_from_page_tables
    from deft_backend.forest import forest_from_paths as forest_from_paths
    from deft_backend.planner import Plan as Plan
    from deft_backend.planner import PlanCapacity as PlanCapacity
    from deft_backend.planner import PlanError as PlanError
    from deft_backend.policies import POLICY_NAMES as POLICY_NAMES
    from deft_backend.policies import PolicyError as PolicyError
    from deft_backend.policies import Target as Target
    from deft_backend.policies import get_policy as get_policy

__version__ = VERSION

_HOMES = {
    "attention": ("AttentionError", "TreeAttention"),
    "forest": ("ForestError", "PrefixForest", "forest_from_page_tables", "forest_from_paths"),
    "planner": ("Plan", "PlanCapacity", "PlanError"),
    "policies": ("POLICY_NAMES", "PolicyError", "Target", "get_policy"),
}

__all__ = [name for names in _HOMES.values() for name in names]


def __getattr__(name: str) -> Any:
    """Import on first use: the command line and servers that do not use us start without torch."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"deft_backend.{home}"), name)
    raise AttributeError(f"module 'deft_backend' has no attribute {name!r}")
