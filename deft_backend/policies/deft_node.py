"""`deft-node`: one group for each tree node."""

from dataclasses import dataclass
from typing import ClassVar

from deft_backend.policies.policy import Rules, TwoRulePolicy
from deft_backend.settings.policy_names import DEFT_NODE


@dataclass(frozen=True)
class DeftNode(TwoRulePolicy):
    """DeFT-Node (DeFT, section 3.3 and Algorithm 1): every edge is cut, and no node.

    ``KVMapQ[i]`` groups the KV of node ``i`` with all queries that share it. So the kernels read
    every KV token once (``2 · d_head · N_tree``, Table 12) and need no mask. The number of QKV
    groups is ``k = #node``. Node lengths, and so the work of thread blocks, may be very uneven.
    """

    name: ClassVar[str] = DEFT_NODE

    @property
    def rules(self) -> Rules:
        return Rules("all", "whole")
