"""`auto`: the grouping that the cost model expects to be fastest for this forest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from deft_backend.forest import PrefixForest
from deft_backend.policies.base import Grouping, PolicyError, Target
from deft_backend.policies.fasttree import FastTree
from deft_backend.policies.flash_decoding import FlashDecoding
from deft_backend.policies.flashforge import FlashForge
from deft_backend.policies.makespan import estimated_ms
from deft_backend.policies.splitting import cut_evenly, fit_chunk_tokens, node_ranges, pieces_by


@dataclass(frozen=True)
class Auto:
    """Candidate groupings, and of them the one with the smallest estimated time.

    A batch that shares nothing goes straight to `flash-decoding`. Otherwise the candidates are
    `flash-decoding`, nodes in chunks as small as fill the thread blocks, `fasttree` and
    `flashforge`; the estimate is the makespan of their items under the profiled cost model and
    the time of their partial results (:func:`~deft_backend.policies.makespan.estimated_ms`).
    """

    name: ClassVar[str] = "auto"

    def group(self, forest: PrefixForest, target: Target) -> Grouping:
        if forest.tokens_stored == forest.tokens_attended:
            return FlashDecoding().group(forest, target)
        candidates: tuple[Callable[[PrefixForest, Target], Grouping], ...] = (
            _adaptive_chunks,
            FastTree().group,
            FlashForge().group,
            FlashDecoding().group,
        )
        best: Grouping | None = None
        fastest = np.inf
        refusal = ""
        for candidate in candidates:
            try:
                grouping = candidate(forest, target)
            except PolicyError as error:  # does not fit the plan; another may
                refusal = str(error)
                continue
            expected = estimated_ms(grouping, target, stop_above=fastest)
            if expected < fastest:
                best, fastest = grouping, expected
        if best is None:
            raise PolicyError(f"no candidate of auto fits the plan: {refusal}")
        return best


def _adaptive_chunks(forest: PrefixForest, target: Target) -> Grouping:
    """Nodes in chunks, of a size that fills the thread blocks instead of a fixed one."""
    ranges = node_ranges(forest)
    chunk = fit_chunk_tokens("auto", ranges, target, fill_programs=True)
    return cut_evenly(ranges, pieces_by(ranges.tokens, chunk), target.block_tokens)
