"""FlashAttention's paged decode: version 3 of vLLM's package or SGLang's, version 2 of vLLM's."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType

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
        module, name = _package()
        assert module is not None, name
        if inputs.k_cache.dtype == torch.float8_e5m2:
            raise Refused("FlashAttention-3 takes e4m3 alone among caches of 8 bits")
        out = torch.empty_like(inputs.q)
        make = _vllm_launch if name == _VLLM else _sglang_launch
        in_8_bits = inputs.k_cache.itemsize == 1
        return Prepared(
            make(module, inputs, out), tolerance=TOLERANCE_IN_8_BITS if in_8_bits else None
        )

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
        out, module = torch.empty_like(inputs.q), import_module(_VLLM)
        tokens, longest = inputs.query_tokens, int(inputs.tables.seq_lens.max())
        starts = torch.arange(inputs.batch + 1, dtype=torch.int32, device=inputs.device) * tokens

        def launch() -> torch.Tensor:
            module.flash_attn_varlen_func(
                inputs.q, inputs.k_cache, inputs.v_cache, max_seqlen_q=tokens, cu_seqlens_q=starts,
                max_seqlen_k=longest, seqused_k=inputs.seq_lens, block_table=inputs.page_table,
                causal=True, out=out, fa_version=2,
            )  # fmt: skip
            return out

        return Prepared(launch)

    def origin(self) -> str:
        return f"{_VLLM} (vllm {installed_version('vllm')}), version 2"


def _vllm_launch(
    module: ModuleType, inputs: Inputs, out: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """The call of vLLM's backend; the scheduler's metadata is prepared before the clock starts."""
    batch, longest = inputs.batch, int(inputs.tables.seq_lens.max())
    tokens = inputs.query_tokens
    starts = torch.arange(batch + 1, dtype=torch.int32, device=inputs.device) * tokens
    metadata = module.get_scheduler_metadata(
        batch_size=batch,
        max_seqlen_q=tokens,
        max_seqlen_k=longest,
        num_heads_q=inputs.case.query_heads,
        num_heads_kv=inputs.case.kv_heads,
        headdim=inputs.head_dim,
        cache_seqlens=inputs.seq_lens,
        qkv_dtype=inputs.k_cache.dtype,
        cu_seqlens_q=starts,
        page_size=inputs.case.page_size,
        causal=True,
        num_splits=0,
    )

    q, scales = inputs.q.to(inputs.k_cache.dtype), _scales(inputs)

    def launch() -> torch.Tensor:
        module.flash_attn_varlen_func(
            q, inputs.k_cache, inputs.v_cache, max_seqlen_q=tokens, cu_seqlens_q=starts,
            max_seqlen_k=longest, seqused_k=inputs.seq_lens, block_table=inputs.page_table,
            causal=True, out=out, scheduler_metadata=metadata, num_splits=0, fa_version=3, **scales,
        )  # fmt: skip
        return out

    return launch


def _sglang_launch(
    module: ModuleType, inputs: Inputs, out: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """The call of SGLang's backend."""
    shape = (inputs.batch, inputs.query_tokens, *out.shape[1:])
    q, result = inputs.q.to(inputs.k_cache.dtype).view(shape), out.view(shape)
    scales = _scales(inputs)

    def launch() -> torch.Tensor:
        module.flash_attn_with_kvcache(
            q, inputs.k_cache, inputs.v_cache, cache_seqlens=inputs.seq_lens,
            page_table=inputs.page_table, causal=True, out=result, **scales,
        )  # fmt: skip
        return out

    return launch


def with_lse(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    starts: torch.Tensor,
    most: int,
    pages: torch.Tensor,
    tokens: torch.Tensor,
    longest: int,
) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """A call for groups of queries, each of which attends to all of its group's KV.

    It returns the output like `q` [T, Hq, D], and the log-sum-exp [Hq, T].

    - `starts`: [G + 1] int32, first query of each group; `most` is the largest group's queries.
    - `pages`: [G, P] int32; `tokens`: [G] int32, at most `longest`.
    """
    module, name = _package()
    assert module is not None, name

    def of_vllm() -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = module.flash_attn_varlen_func(
            q, k_cache, v_cache, max_seqlen_q=most, cu_seqlens_q=starts, max_seqlen_k=longest,
            seqused_k=tokens, block_table=pages, causal=False, return_softmax_lse=True,
            fa_version=3,
        )  # fmt: skip
        return out, lse

    def of_sglang() -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = module.flash_attn_with_kvcache(
            q, k_cache, v_cache, cache_seqlens=tokens, page_table=pages, cu_seqlens_q=starts,
            max_seqlen_q=most, causal=False, return_softmax_lse=True,
        )  # fmt: skip
        return out, lse

    return of_vllm if name == _VLLM else of_sglang


def _scales(inputs: Inputs) -> dict[str, torch.Tensor]:
    """Scales of 1 for each request and KV head, which FlashAttention-3 wants in 8 bits."""
    if inputs.k_cache.itemsize > 1:
        return {}
    one = torch.ones(inputs.batch, inputs.case.kv_heads, device=inputs.device)
    return {f"{name}_descale": one for name in "qkv"}
