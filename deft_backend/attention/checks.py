"""Checks of attentions and their tensors at the library's border, before any kernel runs."""

from __future__ import annotations

import math

import torch

from deft_backend.kernels import EXPONENT_BITS, Gpu, Step, unsupported
from deft_backend.shapes import MAX_QUERY_TOKENS, AttentionShape

_INTEGERS = (torch.int32, torch.int64)


class AttentionError(ValueError):
    """The kernels cannot run this attention, or the tensors do not fit the plan."""


def check_attention(
    shape: AttentionShape, *, max_batch: int, query_tokens: int, gpu: Gpu | None
) -> None:
    """Raise AttentionError for an attention that the kernels cannot run on its device or `gpu`."""
    heads = (shape.num_query_heads, shape.num_kv_heads, shape.head_dim)
    reason = unsupported(*heads, shape.dtype, shape.device, gpu, kv_dtype=shape.kv_dtype)
    if reason is not None:
        raise AttentionError(f"tree attention cannot run: {reason}")
    if shape.page_size < 1:
        raise AttentionError(f"page_size is {shape.page_size}; expected at least 1 token a page")
    if max_batch < 1:
        raise AttentionError(f"max_batch is {max_batch}; expected at least 1 request")
    if not 1 <= query_tokens <= MAX_QUERY_TOKENS:
        raise AttentionError(
            f"query_tokens is {query_tokens}; expected 1 to {MAX_QUERY_TOKENS} a request"
        )


def check_step(
    shape: AttentionShape, step: Step, *, requests: int, rows: int, query_tokens: int
) -> None:
    """Raise AttentionError for the first input that does not fit; `rows` are those of `q`."""
    queries = (rows, shape.num_query_heads, shape.head_dim)
    page = (shape.page_size, shape.num_kv_heads, shape.head_dim)
    device, k_cache, v_cache = shape.device, step.k_cache, step.v_cache
    check_tensor("q", step.q, queries, shape.dtype, device)
    check_tensor("out", step.out, queries, shape.dtype, device)
    check_tensor("k_cache", k_cache, (*k_cache.shape[:1], *page), shape.kv_dtype, device)
    check_tensor("v_cache", v_cache, (*v_cache.shape[:1], *page), shape.kv_dtype, device)
    strides = zip(k_cache.shape, k_cache.stride(), v_cache.stride(), strict=True)
    if any(size > 1 and k != v for size, k, v in strides):
        raise AttentionError(
            f"v_cache has strides {v_cache.stride()}; expected those of k_cache, {k_cache.stride()}"
        )
    check_batch(step.page_table, step.seq_lens, step.table_rows, device, requests)
    _check_scales(shape, step)
    if step.sinks is not None:
        floats = (torch.float32, torch.bfloat16, torch.float16)
        check_tensor("sinks", step.sinks, (shape.num_query_heads,), floats, device)
    if step.query_start is not None:
        check_tensor("query_start", step.query_start, (requests + 1,), torch.int32, device)
    if step.ancestors is not None:  # a bit for each query token, in words of 64
        words = (requests, query_tokens, -(-query_tokens // 64))
        check_tensor("ancestors", step.ancestors, words, torch.int64, device)


def check_batch(
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    table_rows: torch.Tensor,
    device: torch.device,
    requests: int | None = None,
) -> None:
    """Raise AttentionError if these do not fit together, or not a batch of so many `requests`."""
    if page_table.dim() != 2 or page_table.stride(1) != 1:
        raise AttentionError(
            f"page_table has shape {list(page_table.shape)} and strides {page_table.stride()}; "
            "expected [rows, pages] with contiguous rows"
        )
    listed = (len(seq_lens) if requests is None else requests,)
    check_tensor("page_table", page_table, tuple(page_table.shape), _INTEGERS, device)
    check_tensor("seq_lens", seq_lens, listed, _INTEGERS, device)
    check_tensor("table_rows", table_rows, listed, _INTEGERS, device)


def _check_scales(shape: AttentionShape, step: Step) -> None:
    if not 0.0 < step.sm_scale < math.inf:
        raise AttentionError(f"sm_scale is {step.sm_scale}; expected a finite number above 0")
    eight_bits = shape.kv_dtype in EXPONENT_BITS
    for name, scale in (("k_scale", step.k_scale), ("v_scale", step.v_scale)):
        is_tensor = isinstance(scale, torch.Tensor)
        if not eight_bits and (is_tensor or scale != 1.0):
            raise AttentionError(
                f"{name} is given, but the KV cache has the dtype of the queries; only a cache of "
                "8 bits has scales: leave it out, or set kv_dtype"
            )
        if isinstance(scale, torch.Tensor):
            one = tuple(scale.shape) if scale.numel() == 1 else (1,)
            check_tensor(name, scale, one, torch.float32, shape.device)
        elif not 0.0 < scale < math.inf:
            raise AttentionError(f"{name} is {scale}; expected a number above 0")


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    dtypes: torch.dtype | tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Refuse a tensor of another shape, dtype or device, or with a strided last dimension."""
    if tensor.shape != shape:
        raise AttentionError(f"{name} has shape {list(tensor.shape)}; expected {list(shape)}")
    allowed = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    if tensor.dtype not in allowed:
        expected = " or ".join(map(str, allowed))
        raise AttentionError(f"{name} has dtype {tensor.dtype}; expected {expected}")
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise AttentionError(
            f"{name} has stride {tensor.stride(-1)} in its last dimension; expected 1: make it "
            "contiguous"
        )
    if tensor.device != device:
        raise AttentionError(f"{name} is on {tensor.device}; expected {device}")
