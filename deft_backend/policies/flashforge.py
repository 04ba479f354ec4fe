"""`flashforge`: profiled costs, bounded division, longest-first scheduling."""

from dataclasses import dataclass
from typing import ClassVar

from deft_backend.policies.policy import Rules, TwoRulePolicy
from deft_backend.settings.policy_names import FLASHFORGE


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

    @property
    def rules(self) -> Rules:
        return Rules("all", "scheduled")
