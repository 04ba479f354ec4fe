"""`flash-decoding`: the baseline, every query alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from deft_backend.forest import PrefixForest
from deft_backend.policies.grouping import Grouping
from deft_backend.policies.splitting import chunks_by, cut_evenly, fit_chunk_tokens, query_ranges
from deft_backend.policies.target import Target
from deft_backend.settings.policy_names import FLASH_DECODING


@dataclass(frozen=True)
class FlashDecoding:
    """Q-guided grouping (DeFT, section 3.3; Flash-Decoding).

    The policy groups each query with its whole context. So the kernels read a shared prefix once
    for every query: KV IO is ``2 · d_head · sum_i N_i`` (DeFT, Table 12). Contexts are split
    evenly, and only as far as needed to fill the GPU's thread blocks.
    """

    name: ClassVar[str] = FLASH_DECODING
    several_segments: ClassVar[bool] = False
    on_device: ClassVar[bool] = False

    def group(self, forest: PrefixForest, target: Target) -> Grouping:
        ranges = query_ranges(forest)
        chunk = fit_chunk_tokens(self.name, ranges, target, fill_programs=True)
        return cut_evenly(ranges, chunks_by(ranges.tokens, chunk), target.block_tokens)
