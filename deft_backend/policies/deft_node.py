"""`deft-node`: one group for each tree node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from deft_backend.forest import PrefixForest
from deft_backend.policies.grouping import Grouping
from deft_backend.policies.splitting import check_limits, cut_evenly, node_ranges
from deft_backend.policies.target import Target
from deft_backend.settings.policy_names import DEFT_NODE


@dataclass(frozen=True)
class DeftNode:
    """DeFT-Node (DeFT, section 3.3 and Algorithm 1): KV-guided grouping, split by node.

    ``KVMapQ[i]`` groups the KV of node ``i`` with all queries that share it. So the kernels read
    every KV token once (``2 · d_head · N_tree``, Table 12) and need no mask. The number of QKV
    groups is ``k = #node``. Node lengths, and so the work of thread blocks, may be very uneven.
    """

    name: ClassVar[str] = DEFT_NODE
    several_segments: ClassVar[bool] = False
    on_device: ClassVar[bool] = False

    def group(self, forest: PrefixForest, target: Target) -> Grouping:
        ranges = node_ranges(forest)
        check_limits(self.name, len(ranges.request), len(ranges.queries), target)
        return cut_evenly(ranges, np.ones_like(ranges.num_queries), target.block_tokens)
