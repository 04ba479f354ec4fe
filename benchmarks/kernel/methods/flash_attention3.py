"""FlashAttention's paged decode: version 3 of vLLM's package or SGLang's, version 2 of vLLM's."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, NamedTuple

import torch

from benchmarks.kernel.case_inputs import Inputs
from benchmarks.kernel.methods.base import Method, Prepared, Refused
from deft_backend.settings.version import installed_version

_HOPPER = 9

# Import by name at run time: both kernel packages work without their server, and no module here may
# depend on a server.
_VLLM = "vllm.vllm_flash_attn.flash_attn_interface"
_SGLANG = "sgl_kernel.flash_attn"


@cache
def _package() -> tuple[ModuleType | None, str]:
    """The first package with the kernel, or why no package has it."""
    reasons = []
    for name in (_VLLM, _SGLANG):
        try:
            module = import_module(name)
        except Exception as error:  # a broken extension may raise anything
            reasons.append(f"{name}: {error}".splitlines()[0])
            continue
        if name == _VLLM and not module.FA3_AVAILABLE:
            reasons.append(f"{name}: {module.FA3_UNAVAILABLE_REASON}".splitlines()[0])
            continue
        return module, name
    return None, "; ".join(reasons)


TOLERANCE_IN_8_BITS = 0.1
"""Relative error above which a product of operands of 8 bits is wrong."""


class Call(NamedTuple):
    """Groups of queries, each with KV of its own; G is the number of groups."""

    q: torch.Tensor  # [T, Hq, D]
    keys: torch.Tensor
    values: torch.Tensor  # [pages, page size, Hkv, D]
    starts: torch.Tensor  # [G + 1] int32: first query of each group
    most: int  # queries of the largest group
    pages: torch.Tensor  # [G, P] int32
    tokens: torch.Tensor  # [G] int32: KV of each group
    longest: int  # tokens of the longest group
    causal: bool = True  # whether a group's queries are its last tokens

    @classmethod
    def of(cls, inputs: Inputs) -> Call:
        """Each request alone. FlashAttention-3 reads caches of 8 bits with queries of 8 bits."""
        most = inputs.query_tokens
        starts = torch.arange(inputs.batch + 1, dtype=torch.int32, device=inputs.device) * most
        q, longest = inputs.q.to(inputs.k_cache.dtype), int(inputs.tables.seq_lens.max())
        where = (starts, most, inputs.page_table, inputs.seq_lens, longest)
        return cls(q, inputs.k_cache, inputs.v_cache, *where)

    def run_vllm(self, module: ModuleType, version: int, **options: Any) -> Any:
        """The call of vLLM's backend."""
        return module.flash_attn_varlen_func(
            self.q,
            self.keys,
            self.values,
            max_seqlen_q=self.most,
            cu_seqlens_q=self.starts,
            max_seqlen_k=self.longest,
            seqused_k=self.tokens,
            block_table=self.pages,
            causal=self.causal,
            fa_version=version,
            **options,
        )

    def run_sglang(self, module: ModuleType, **options: Any) -> Any:
        """The call of SGLang's backend."""
        return module.flash_attn_with_kvcache(
            self.q,
            self.keys,
            self.values,
            cache_seqlens=self.tokens,
            page_table=self.pages,
            cu_seqlens_q=self.starts,
            max_seqlen_q=self.most,
            causal=self.causal,
            **options,
        )

    def run(self, **options: Any) -> Any:
        """FlashAttention-3 of the package that is installed."""
        module, name = _package()
        assert module is not None, name
        return (
            self.run_vllm(module, 3, **options)
            if name == _VLLM
            else self.run_sglang(module, **options)
        )


class FlashAttention3(Method):
    """Each request alone with its whole KV, split by FlashAttention's own heuristic.

    It computes several query tokens of a request with its causal mask. Over a cache of 8 bits it
    multiplies in 8 bits: queries and weights are rounded to the cache's dtype, and the time to
    round the queries is not counted. Its result then has a larger error than that of the other
    methods.
    """

    name = "fa3"

    def unavailable(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "needs an NVIDIA GPU"
        major = torch.cuda.get_device_capability(device)[0]
        if major != _HOPPER:
            return f"needs a Hopper GPU (compute capability 9); this one has {major}"
        module, found = _package()
        return None if module is not None else found

    def prepare(self, inputs: Inputs) -> Prepared:
        if inputs.ancestors is not None:
            raise Refused("FlashAttention-3 has no mask for token trees")
        if inputs.k_cache.dtype == torch.float8_e5m2:
            raise Refused("FlashAttention-3 takes e4m3 alone among caches of 8 bits")
        out, call, options = torch.empty_like(inputs.q), Call.of(inputs), _options(inputs)

        def launch() -> torch.Tensor:
            call.run(out=out, **options)
            return out

        in_8_bits = inputs.k_cache.itemsize == 1
        return Prepared(launch, tolerance=TOLERANCE_IN_8_BITS if in_8_bits else None)

    def origin(self) -> str:
        name = _package()[1]
        distribution = "vllm" if name == _VLLM else "sglang-kernel"
        found = installed_version(distribution)
        if found is None:
            return f"{name} (version unknown: unpacked without its metadata)"
        return f"{name} ({distribution} {found})"


class FlashAttention2(Method):
    """The same with FlashAttention-2, which needs no Hopper GPU: the peer of the plain kernels."""

    name = "fa2"

    def unavailable(self, device: torch.device) -> str | None:
        if device.type != "cuda":
            return "needs an NVIDIA GPU"
        try:
            module = import_module(_VLLM)
        except Exception as error:  # a broken extension may raise anything
            return f"{_VLLM}: {error}".splitlines()[0]
        return None if module.FA2_AVAILABLE else str(module.FA2_UNAVAILABLE_REASON)

    def prepare(self, inputs: Inputs) -> Prepared:
        if inputs.ancestors is not None:
            raise Refused("FlashAttention-2 has no mask for token trees")
        if inputs.k_cache.itemsize == 1:
            raise Refused("FlashAttention-2 reads no cache of 8 bits")
        if inputs.case.page_size % 16:
            raise Refused("FlashAttention-2 takes pages of multiples of 16 tokens")
        out, call, module = torch.empty_like(inputs.q), Call.of(inputs), import_module(_VLLM)

        def launch() -> torch.Tensor:
            call.run_vllm(module, 2, out=out)
            return out

        return Prepared(launch)

    def origin(self) -> str:
        return f"{_VLLM} (vllm {installed_version('vllm')}), version 2"


def _options(inputs: Inputs) -> dict[str, Any]:
    """Scales of 1 for 8 bits, and the metadata of vLLM's scheduler; no clock counts them."""
    options: dict[str, Any] = {}
    if inputs.k_cache.itemsize == 1:
        one = torch.ones(inputs.batch, inputs.case.kv_heads, device=inputs.device)
        options = {f"{name}_descale": one for name in "qkv"}
    module, name = _package()
    if module is not None and name == _VLLM:
        call = Call.of(inputs)
        options["scheduler_metadata"] = module.get_scheduler_metadata(
            batch_size=inputs.batch,
            max_seqlen_q=call.most,
            max_seqlen_k=call.longest,
            num_heads_q=inputs.case.query_heads,
            num_heads_kv=inputs.case.kv_heads,
            headdim=inputs.head_dim,
            cache_seqlens=call.tokens,
            qkv_dtype=inputs.k_cache.dtype,
            cu_seqlens_q=call.starts,
            page_size=inputs.case.page_size,
            causal=True,
            num_splits=0,
        )
    return options
