"""The shape of an attention: its heads, element types and pages, and the device it runs on."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AttentionShape:
    """What stays the same for all batches of one attention."""

    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of queries and output
    kv_dtype: torch.dtype  # of the KV cache
    device: torch.device
    page_size: int  # tokens of a page of the KV cache

    @property
    def gqa_group(self) -> int:
        """Query heads that share a KV head."""
        return self.num_query_heads // self.num_kv_heads
