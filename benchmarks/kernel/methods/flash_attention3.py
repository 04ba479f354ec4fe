"""FlashAttention-3's paged decode from vLLM's package, or else from SGLang's."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType

import torch

from benchmarks.kernel.case_inputs import Inputs
from benchmarks.kernel.methods.base import Method, Prepared, Refused
from deft_backend.installed import installed_version

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


class FlashAttention3(Method):
    """Each request alone with its whole KV, split by FlashAttention's own heuristic.

    Several query tokens of a request are its causal mask.
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
        out = torch.empty_like(inputs.q)
        make = _vllm_launch if name == _VLLM else _sglang_launch
        return Prepared(make(module, inputs, out))

    def origin(self) -> str:
        name = _package()[1]
        distribution = "vllm" if name == _VLLM else "sglang-kernel"
        found = installed_version(distribution)
        if found is None:
            return f"{name} (version unknown: unpacked without its metadata)"
        return f"{name} ({distribution} {found})"


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
        qkv_dtype=inputs.q.dtype,
        cu_seqlens_q=starts,
        page_size=inputs.case.page_size,
        causal=True,
        num_splits=0,
    )

    def launch() -> torch.Tensor:
        module.flash_attn_varlen_func(
            inputs.q, inputs.k_cache, inputs.v_cache, max_seqlen_q=tokens, cu_seqlens_q=starts,
            max_seqlen_k=longest, seqused_k=inputs.seq_lens, block_table=inputs.page_table,
            causal=True, out=out, scheduler_metadata=metadata, num_splits=0, fa_version=3,
        )  # fmt: skip
        return out

    return launch


def _sglang_launch(
    module: ModuleType, inputs: Inputs, out: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """The call of SGLang's backend."""
    shape = (inputs.batch, inputs.query_tokens, *out.shape[1:])
    q, result = inputs.q.view(shape), out.view(shape)

    def launch() -> torch.Tensor:
        module.flash_attn_with_kvcache(
            q, inputs.k_cache, inputs.v_cache, cache_seqlens=inputs.seq_lens,
            page_table=inputs.page_table, causal=True, out=result,
        )  # fmt: skip
        return out

    return launch
