"""The kernels of a server that does not run yet: from its head shape and its host alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from deft_backend.attention import Gpu, TreeAttention
from deft_backend.compile.variants import Variant
from deft_backend.config import Settings
from deft_backend.hosts.common.planner_choice import (
    SGLANG,
    VLLM,
    Adapter,
    planned_on_device,
    selects_device_planner,
)
from deft_backend.hosts.common.warm_up import StepTensors, decode_variants

_COLUMNS = (16, 18)
"""Widths of a page table: kernels differ only by whether the width is a multiple of 16."""


@dataclass(frozen=True)
class DescribedServer:
    """A server as far as its kernels depend on it.

    Attributes
    ----------
    host : str
        ``sglang`` or ``vllm``.
    num_query_heads, num_kv_heads, head_dim : int
        On one GPU.
    dtype : torch.dtype
    page_size : int
        Tokens of a page; 1 with SGLang.
    max_batch : int
        Most requests that decode at once.
    """

    host: str
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    page_size: int
    max_batch: int

    def variants(self, gpu: Gpu, settings: Settings) -> list[Variant]:
        """The kernels that the server launches on a GPU, which need not be at hand.

        Raises
        ------
        AttentionError
            If the kernels cannot run this attention on that GPU.
        PolicyError
            If ``DEFT_POLICY`` does not fit the device planner.
        """
        adapter, tensors = _HOSTS[self.host]
        on_device = selects_device_planner(settings, adapter, gpu.capability)
        largest = min(settings.max_batch, self.max_batch)
        attention = TreeAttention(
            num_query_heads=self.num_query_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            device="cpu",
            page_size=self.page_size,
            max_batch=planned_on_device(largest) if on_device else largest,
            policy=settings.policy,
            compiled_for=gpu,
        )
        return decode_variants(
            attention, tensors(self), on_device=on_device, smallest=settings.min_batch
        )


def _sglang_tensors(server: DescribedServer) -> StepTensors:
    shape = (2, server.num_kv_heads, server.head_dim)
    k_cache, v_cache = torch.zeros((2, *shape), dtype=server.dtype)
    return StepTensors(k_cache, v_cache, _COLUMNS)


def _vllm_tensors(server: DescribedServer) -> StepTensors:
    """Tokens before heads in memory (NHD), layer by layer: the default with FLASH_ATTN."""
    dim = server.head_dim
    shape = (2, server.page_size, server.num_kv_heads, 2 * dim)
    cache = torch.zeros(shape, dtype=server.dtype)
    return StepTensors(
        cache[..., :dim], cache[..., dim:], _COLUMNS, rows_dtype=torch.int32,
        lens_dtype=torch.int32,
    )  # fmt: skip


_HOSTS: dict[str, tuple[Adapter, Callable[[DescribedServer], StepTensors]]] = {
    "sglang": (SGLANG, _sglang_tensors),
    "vllm": (VLLM, _vllm_tensors),
}
