"""What follows from the number of query tokens of a request: kernel configuration and target."""

from __future__ import annotations

from typing import NamedTuple

import torch

from deft_backend.attention.device_target import target_of
from deft_backend.kernels import Gpu, KernelConfiguration, kernel_configuration
from deft_backend.policies import Target
from deft_backend.query_blocks import QueryBlocks


class QueryShape(NamedTuple):
    """How requests of so many query tokens are planned and run."""

    blocks: QueryBlocks
    config: KernelConfiguration
    target: Target


class QueryShapes(dict[int, QueryShape]):
    """The :class:`QueryShape` of each number of query tokens, made when it is first used."""

    def __init__(
        self,
        num_query_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        kv_dtype: torch.dtype,
        device: torch.device,
        page_size: int,
        gpu: Gpu | None,
    ) -> None:
        super().__init__()
        self._heads = (num_query_heads, num_kv_heads, head_dim)
        self._dtype, self._kv_dtype = dtype, kv_dtype
        self._device = device
        self._page_size = page_size
        self._gpu = gpu

    def __missing__(self, query_tokens: int) -> QueryShape:
        query_heads, kv_heads, head_dim = self._heads
        group = query_heads // kv_heads
        blocks = QueryBlocks.of(query_tokens, group)
        config = kernel_configuration(
            head_dim, self._dtype, self._device, group, self._gpu, query_tokens=blocks.tokens,
            kv_dtype=self._kv_dtype,
        )  # fmt: skip
        target = target_of(
            config, num_query_heads=query_heads, num_kv_heads=kv_heads, head_dim=head_dim,
            dtype=self._kv_dtype, device=self._device, page_size=self._page_size, blocks=blocks,
        )  # fmt: skip
        self[query_tokens] = QueryShape(blocks, config, target)
        return self[query_tokens]
