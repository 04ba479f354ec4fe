"""`flash-decoding`: the baseline, every query alone."""

from dataclasses import dataclass
from typing import ClassVar

from deft_backend.policies.policy import FLATTENED, Rules, TwoRulePolicy
from deft_backend.settings.policy_names import FLASH_DECODING


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
