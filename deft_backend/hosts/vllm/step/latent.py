"""The group of an MLA model's layers: its steps run through `LatentAttention`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from deft_backend.hosts.common.division import LayerShape
from deft_backend.hosts.vllm.step.group import GroupAttention
from deft_backend.hosts.vllm.step.step import LayerCall, TreeStep


@dataclass(eq=False)
class LatentGroup(GroupAttention):
    """The `LatentAttention` of one attention group; the device planner makes its plans."""

    attention: Any  # `LatentAttention`; every use of what it lacks is replaced below

    def __post_init__(self) -> None:
        held = self.attention.shape
        self.shape = LayerShape(held.num_query_heads, 1, held.latent_dim)
        self.dtype = self.kv_dtype = held.dtype
        self.page_size, self.query_tokens = held.page_size, self.attention.query_tokens

    def _run(self, step: TreeStep, call: LayerCall, rows: torch.Tensor) -> None:
        self.attention.run(
            call.query, call.query_rope, call.kv_cache, step.page_table,
            sm_scale=call.layer.sm_scale, out=rows,
        )  # fmt: skip
