"""`deft-node` and `deft-node-chunk`: groups of tree nodes, whole or cut into chunks."""

from dataclasses import dataclass
from typing import ClassVar

from deft_backend.policies.policy import Rules, TwoRulePolicy
from deft_backend.policies.target import PolicyError
from deft_backend.settings.policy_names import DEFT_NODE, DEFT_NODE_CHUNK


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


@dataclass(frozen=True)
class DeftNodeChunk(TwoRulePolicy):
    """DeFT-Node-Chunk (DeFT, section 3.3): every edge is cut, and nodes into even chunks.

    The number of QKV groups is ``k = sum_i ceil(n_i / b_s)`` (Table 12), ``b_s`` being
    `chunk_tokens`. Short nodes still make short groups. If the plan cannot hold that many groups,
    the chunks are 2, 4, 8, … times as long.
    """

    name: ClassVar[str] = DEFT_NODE_CHUNK

    chunk_tokens: int = 128  # KV tokens of a chunk; DeFT uses 128

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise PolicyError(f"chunk_tokens is {self.chunk_tokens}; expected at least 1")

    @property
    def rules(self) -> Rules:
        return Rules("all", "fixed", self.chunk_tokens)
