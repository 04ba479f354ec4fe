"""The kernels of a server of an MLA model that is not running yet."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deft_backend.attention import (
    AttentionError,
    Gpu,
    LatentAttention,
    plain_latent_attention,
)
from deft_backend.compile.variants import Variant
from deft_backend.hosts.common.planner_choice import HOPPER, planned_on_device
from deft_backend.hosts.common.warm_up import latent_variants
from deft_backend.settings.config import Settings

_INTEGERS = {"sglang": torch.int64, "vllm": torch.int32}  # of table rows and sequence lengths


@dataclass(frozen=True)
class DescribedLatentServer:
    """A server with ``DEFT_MLA=1``, as far as its kernels depend on it."""

    host: str  # ``sglang`` or ``vllm``
    num_query_heads: int  # on one GPU
    dtype: torch.dtype
    page_size: int  # tokens of a page; 1 with SGLang
    max_batch: int  # most requests that decode at once
    query_tokens: int = 1  # of each request: more in the verification of chains

    def variants(self, gpu: Gpu, settings: Settings) -> list[Variant]:
        """The kernels that the server launches on a GPU, which need not be at hand.

        Raises AttentionError if the server would leave this attention to the host.
        """
        if gpu.capability != HOPPER:
            raise AttentionError(
                f"MLA needs a GPU of compute capability 9.0 (Hopper), and the target is {gpu.name}"
            )
        group = self.num_query_heads if self.host == "vllm" else 1
        largest = min(settings.max_batch, self.max_batch)
        largest = planned_on_device(largest, self.query_tokens, group)
        attention = LatentAttention(
            num_query_heads=self.num_query_heads, dtype=self.dtype, device="cpu",
            kernel=plain_latent_attention, page_size=self.page_size, max_batch=largest,
            query_tokens=self.query_tokens, compiled_for=gpu,
        )  # fmt: skip
        integers = _INTEGERS[self.host]
        return latent_variants(attention, (integers, integers))
