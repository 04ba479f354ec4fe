"""`deft-node-chunk`: tree nodes, large ones cut into chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from deft_backend.forest import PrefixForest
from deft_backend.policies.grouping import Grouping
from deft_backend.policies.policy import PolicyError
from deft_backend.policies.splitting import chunks_by, cut_by, fit_chunk_tokens, node_ranges
from deft_backend.policies.target import Target
from deft_backend.settings.policy_names import DEFT_NODE_CHUNK


@dataclass(frozen=True)
class DeftNodeChunk:
    """DeFT-Node-Chunk (DeFT, section 3.3): nodes cut into chunks of at most `chunk_tokens`.

    The number of QKV groups is ``k = sum_i ceil(n_i / b_s)`` (Table 12), ``b_s`` being
    `chunk_tokens`. Short nodes still make short groups. If the plan cannot hold that many groups,
    the chunks become longer.

    Attributes
    ----------
    chunk_tokens : int
        KV tokens of a chunk; DeFT uses 128.
    """

    name: ClassVar[str] = DEFT_NODE_CHUNK
    several_segments: ClassVar[bool] = False
    on_device: ClassVar[bool] = False

    chunk_tokens: int = 128

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise PolicyError(f"chunk_tokens is {self.chunk_tokens}; expected at least 1")

    def group(self, forest: PrefixForest, target: Target) -> Grouping:
        ranges = node_ranges(forest)
        num_chunks = chunks_by(ranges.tokens, self.chunk_tokens)
        chunk = self.chunk_tokens
        if (
            num_chunks.sum() > target.max_groups
            or (num_chunks * ranges.num_queries).sum() > target.max_group_queries
        ):
            chunk = fit_chunk_tokens(
                self.name, ranges, target, fill_programs=False, minimum=self.chunk_tokens
            )
        return cut_by(ranges, chunk)
