"""The kernels of a server that is not running yet: from its arguments and its model's shape."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from deft_backend.attention import Gpu, TreeAttention
from deft_backend.compile.variants import Variant
from deft_backend.hosts.common.limits import planned_on_device
from deft_backend.hosts.common.warm_up import Drafts, LayerKind, StepTensors, step_variants
from deft_backend.settings.config import Settings

_COLUMNS = (4096, 4098)  # of a page table: kernels differ only by whether 16 divides them

_INTEGERS = {"sglang": torch.int64, "vllm": torch.int32}  # of table rows and sequence lengths


@dataclass(frozen=True)
class DescribedServer:
    host: str  # ``sglang`` or ``vllm``
    num_query_heads: int  # on one GPU, like the others
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    page_size: int  # tokens of a page; 1 with SGLang
    max_batch: int  # most requests that decode at once
    kv_dtype: torch.dtype | None = None  # of the KV cache; None: `dtype`
    drafts: Drafts | None = None  # what it verifies; None: nothing
    layers: tuple[LayerKind, ...] = (LayerKind(),)  # each kind of those through tree attention

    def __str__(self) -> str:
        dtypes = [self.dtype] if self.kv_dtype is None else [self.dtype, self.kv_dtype]
        words = [
            self.host,
            f"heads {self.num_query_heads}/{self.num_kv_heads} of {self.head_dim}",
            " with KV in ".join(str(dtype).removeprefix("torch.") for dtype in dtypes),
            f"pages of {self.page_size}",
            f"up to {self.max_batch} requests",
        ]
        if self.drafts is not None:
            shape = "trees" if self.drafts.trees else "chains"
            words.append(f"{shape} of up to {self.query_tokens} query tokens")
        words += ["soft cap"] * any(layer.soft_cap for layer in self.layers)
        words += ["sinks"] * any(layer.sinks is not None for layer in self.layers)
        return ", ".join(words)

    @property
    def query_tokens(self) -> int:
        return 1 if self.drafts is None else self.drafts.query_tokens

    def variants(self, gpu: Gpu, settings: Settings) -> list[Variant]:
        group = max(1, self.num_query_heads // self.num_kv_heads)
        largest = min(settings.max_batch, self.max_batch)
        attention = TreeAttention(
            num_query_heads=self.num_query_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            kv_dtype=self.kv_dtype,
            device="cpu",
            page_size=self.page_size,
            max_batch=planned_on_device(largest, self.query_tokens, group),
            query_tokens=self.query_tokens,
            policy=settings.policy,
            compiled_for=gpu,
        )
        return step_variants(attention, self._tensors(), smallest=settings.min_batch)

    def _tensors(self) -> StepTensors:
        """Two pages of a layer, as the host lays them out in memory."""
        dtype, dim = self.kv_dtype or self.dtype, self.head_dim
        if self.host == "sglang":
            k_cache, v_cache = torch.zeros((2, 2, self.num_kv_heads, dim), dtype=dtype)
        else:  # tokens before heads (NHD), layer by layer: the default with FLASH_ATTN
            cache = torch.zeros((2, self.page_size, self.num_kv_heads, 2 * dim), dtype=dtype)
            k_cache, v_cache = cache[..., :dim], cache[..., dim:]
        return StepTensors(
            k_cache,
            v_cache,
            _COLUMNS,
            integers=_INTEGERS[self.host],
            drafts=self.drafts,
            layers=self.layers,
        )
