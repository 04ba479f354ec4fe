"""Policies that cut every edge, or none: Flash-Decoding, DeFT-Node, DeFT-Node-Chunk, FlashForge."""

from dataclasses import dataclass
from typing import ClassVar

from deft_backend.policies.policy import FLATTENED, Rules, TwoRulePolicy
from deft_backend.policies.target import PolicyError
from deft_backend.settings.policy_names import (
    DEFT_NODE,
    DEFT_NODE_CHUNK,
    FLASH_DECODING,
    FLASHFORGE,
)


@dataclass(frozen=True)
class FlashDecoding(TwoRulePolicy):
    """Q-guided grouping (DeFT, section 3.3; Flash-Decoding): no edge is cut.

    The policy groups each query with its whole context. So the kernels read a shared prefix once
    for every query: KV IO is ``2 · d_head · sum_i N_i`` (DeFT, Table 12). Contexts are split
    evenly, and only as far as needed to fill the GPU's thread blocks.
    """

    name: ClassVar[str] = FLASH_DECODING
    instead_of: Rules | None = None
    """Rules of a policy whose plan does not fit; its contexts get their chunks by the same rule."""

    @property
    def rules(self) -> Rules:
        if self.instead_of is None:
            return Rules("none", "filling")
        if self.instead_of.edges == FLATTENED:
            return Rules("none", "whole")
        return self.instead_of._replace(edges="none")


@dataclass(frozen=True)
class DeftNode(TwoRulePolicy):
    """DeFT-Node (DeFT, section 3.3 and Algorithm 1): every edge is cut, and no node.

    ``KVMapQ[i]`` groups the KV of node ``i`` with all queries that share it. So the kernels read
    every KV token once (``2 · d_head · N_tree``, Table 12) and need no mask. The number of QKV
    groups is ``k = #node``. Node lengths, and so the work of thread blocks, may be very uneven.
    """

    name: ClassVar[str] = DEFT_NODE
    rules: ClassVar[Rules] = Rules("all", "whole")


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


@dataclass(frozen=True)
class FlashForge(TwoRulePolicy):
    """FlashForge's task division and scheduling (FlashForge, section 5): every edge is cut.

    A node and its queries are a task, whose KV is divided into ``b_k`` slices. The policy minimises
    the makespan ``max_i sum_j C[j] · A[i, j]`` (equation 3) over the programs of the tile shape
    that runs the task: each tile shape has a launch of its own.

    1. Costs come from a profiled table with interpolation, ``C_est(n_q, n)`` (section 5.2).
    2. ``b_k[i] = ceil(C_est(n_q[i], n[i]) / c)`` (equation 5), at most one slice for each KV block.
       Queries are divided only if they exceed the kernels' largest tile (else ``b_q = 1``).
    3. A grid search over costs ``c``, from that of the longest task down, keeps the division with
       the smallest makespan (``chunk_choice.py``); of equal ones the coarser, with fewer partial
       results.
    4. Longest-first scheduling (Graham): items lie in that order, and programs take them in turn
       (docs/papers.md says what the whole schedule would gain). Within a tile shape more tokens
       never take less time, so order by length is order by cost.
    """

    name: ClassVar[str] = FLASHFORGE
    rules: ClassVar[Rules] = Rules("all", "scheduled")
