"""Requests that share one prefix, as MLA's hosts hold them, and the host's attention of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

import torch

from deft_backend.kernels.latent import LatentCall, LatentKernel
from deft_backend.kernels.latent_kernels import KernelBatch
from deft_backend.shapes import ROPE_DIM, VALUE_DIM

SCALE = 192**-0.5


@dataclass(frozen=True)
class LatentCase:
    """`requests` requests of `shared` tokens in common and `own` tokens each."""

    requests: int
    shared: int
    own: int
    heads: int
    query_tokens: int
    page_size: int


class LatentInputs:
    """The tensors of a case: a shuffled page table, random latents and queries."""

    def __init__(self, case: LatentCase, device: torch.device) -> None:
        torch.manual_seed(0)
        size, requests = case.page_size, case.requests
        shared, own = -(-case.shared // size), -(-case.own // size)
        assert shared * size == case.shared, "the shared prefix is whole pages"
        pages = torch.randperm(shared + requests * own + 1, device=device).to(torch.int32)
        prefix = pages[:shared].expand(requests, shared)
        table = torch.cat([prefix, pages[shared:-1].view(requests, own)], dim=1)
        self.case = case
        self.page_table = table.contiguous()
        self.cache = torch.randn(
            len(pages), size, 1, VALUE_DIM + ROPE_DIM, device=device, dtype=torch.bfloat16
        )
        tokens = requests * case.query_tokens
        q = torch.randn(tokens, case.heads, VALUE_DIM + ROPE_DIM, device=device)
        self.q_nope = q[..., :VALUE_DIM].to(torch.bfloat16).contiguous()
        self.q_rope = q[..., VALUE_DIM:].to(torch.bfloat16).contiguous()
        lens = [case.shared + case.own] * requests
        self.seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)

    @property
    def attended(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries in both parts, latents and page table."""
        return self.q_nope, self.q_rope, self.cache, self.page_table

    def host_call(self) -> LatentCall:
        """Each request alone with its whole context, as hosts decode."""
        case, device = self.case, self.seq_lens.device
        starts = torch.arange(case.requests + 1, dtype=torch.int32, device=device)
        rows = torch.arange(case.requests, dtype=torch.int32, device=device)
        batch = KernelBatch(starts * case.query_tokens, rows, torch.zeros_like(rows), self.seq_lens)
        tokens = case.query_tokens
        return LatentCall(*self.attended, batch, tokens, SCALE, causal=True, most_splits=0)

    def reference(self) -> torch.Tensor:
        """[T, H, VALUE_DIM] float64, request by request."""
        case = self.case
        latents = self.cache.view(-1, VALUE_DIM + ROPE_DIM)
        q = torch.cat([self.q_nope, self.q_rope], dim=-1).double()
        out = torch.empty_like(self.q_nope, dtype=torch.float64)
        length, tokens = case.shared + case.own, case.query_tokens
        position = torch.arange(length, device=q.device)
        hidden = (
            position[None, :] > (length - tokens + torch.arange(tokens, device=q.device))[:, None]
        )
        for r in range(case.requests):
            page = self.page_table[r, position // case.page_size].long()
            kv = latents[page * case.page_size + position % case.page_size].double()
            scores = torch.einsum("thd,kd->htk", q[r * tokens : (r + 1) * tokens], kv) * SCALE
            weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
            out[r * tokens : (r + 1) * tokens] = torch.einsum(
                "htk,kd->thd", weights, kv[:, :VALUE_DIM]
            )
        return out


def hosts_kernel() -> tuple[str, LatentKernel, Callable[[LatentCall], torch.Tensor]]:
    """The host package, its kernel for plans, and its decode as the host calls it."""
    try:
        import_module("vllm.vllm_flash_attn.flash_attn_interface")
    except ImportError:
        from deft_backend.hosts.sglang.latent import sglang_latent_attention

        return "sglang", sglang_latent_attention, _sglang_decode
    from deft_backend.hosts.vllm.latent import vllm_latent_attention

    return "vllm", vllm_latent_attention, _vllm_decode


def _sglang_decode(call: LatentCall) -> torch.Tensor:
    attend = import_module("sgl_kernel.flash_attn").flash_attn_with_kvcache
    out: torch.Tensor = attend(
        q=call.q_rope,
        k_cache=call.cache[..., VALUE_DIM:],
        v_cache=call.cache[..., :VALUE_DIM],
        qv=call.q_nope,
        page_table=call.page_table,
        cache_seqlens=call.batch.end,
        cu_seqlens_q=call.batch.query_start,
        max_seqlen_q=call.max_query_tokens,
        softmax_scale=call.sm_scale,
        causal=True,
    )
    return out


def _vllm_decode(call: LatentCall) -> torch.Tensor:
    attend = import_module("vllm.vllm_flash_attn.flash_attn_interface").flash_attn_varlen_func
    out: torch.Tensor = attend(
        q=call.q_rope,
        k=call.cache[..., VALUE_DIM:],
        v=call.cache[..., :VALUE_DIM],
        q_v=call.q_nope,
        max_seqlen_q=call.max_query_tokens,
        cu_seqlens_q=call.batch.query_start,
        max_seqlen_k=call.page_table.shape[1] * call.cache.shape[1],
        seqused_k=call.batch.end,
        block_table=call.page_table,
        softmax_scale=call.sm_scale,
        causal=True,
        fa_version=3,
    )
    return out
