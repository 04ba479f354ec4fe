"""Checks of an attention's shape and of a step's tensors, before any kernel runs."""

from __future__ import annotations

import math

import torch

from deft_backend.kernel_limits import MAX_QUERY_TOKENS
from deft_backend.kernels import Gpu, unsupported


class AttentionError(ValueError):
    """The kernels cannot run this attention, or the tensors do not fit the plan."""


def check_attention(
    num_query_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    page_size: int,
    max_batch: int,
    query_tokens: int = 1,
    kv_dtype: torch.dtype | None = None,
    gpu: Gpu | None = None,
) -> None:
    """Refuse an attention that the kernels cannot run: on this device, on `gpu`, or at all.

    Raises
    ------
    AttentionError
        The message names the value and the supported ones.
    """
    reason = unsupported(
        num_query_heads, num_kv_heads, head_dim, dtype, device, gpu, kv_dtype=kv_dtype
    )
    if reason is not None:
        raise AttentionError(f"tree attention cannot run: {reason}")
    if page_size < 1:
        raise AttentionError(f"page_size is {page_size}; expected at least 1 token a page")
    if max_batch < 1:
        raise AttentionError(f"max_batch is {max_batch}; expected at least 1 request")
    if not 1 <= query_tokens <= MAX_QUERY_TOKENS:
        raise AttentionError(
            f"query_tokens is {query_tokens}; expected 1 to {MAX_QUERY_TOKENS} a request"
        )


def check_step(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    table_rows: torch.Tensor,
    out: torch.Tensor,
    *,
    batch: int,
    queries: tuple[int, int, int],
    page: tuple[int, int, int],
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Refuse tensors of a decode step that do not fit one another, the plan or the device.

    Parameters
    ----------
    batch : int
        Requests.
    queries : T, Hq, D
        Shape of `q` and `out`.
    page : page_size, Hkv, D
        Shape of a page of the caches, [pages, page_size, Hkv, D].
    dtype, kv_dtype : torch.dtype
        Of queries and output, and of the caches.

    Raises
    ------
    AttentionError
        For the first tensor that does not fit.
    """
    for name, tensor in (("q", q), ("out", out)):
        _check_operand(name, tensor, queries, dtype)
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        _check_operand(name, tensor, (*tensor.shape[:1], *page), kv_dtype)
    _check_table(page_table)
    _check_lists(batch, seq_lens=seq_lens, table_rows=table_rows)
    _check_integers(page_table=page_table, seq_lens=seq_lens, table_rows=table_rows)
    _check_device(
        device, page_table=page_table, seq_lens=seq_lens, table_rows=table_rows, q=q, out=out,
        k_cache=k_cache, v_cache=v_cache,
    )  # fmt: skip


def check_query_start(query_start: torch.Tensor, batch: int, device: torch.device) -> None:
    """Refuse rows of requests that do not fit the batch or the device.

    Raises
    ------
    AttentionError
        If shape, dtype or device do not fit.
    """
    _check_lists(batch + 1, query_start=query_start)
    if query_start.dtype != torch.int32:
        raise AttentionError(f"query_start has dtype {query_start.dtype}; expected int32")
    _check_device(device, query_start=query_start)


def check_ancestors(
    ancestors: torch.Tensor, batch: int, query_tokens: int, device: torch.device
) -> None:
    """Refuse bits of token trees that do not fit the batch, the plan or the device.

    Raises
    ------
    AttentionError
        If shape, dtype, strides or device do not fit.
    """
    words = -(-query_tokens // 64)
    expected = (batch, query_tokens, words)
    if ancestors.shape != expected:
        raise AttentionError(
            f"ancestors has shape {list(ancestors.shape)}; expected {list(expected)}: a bit for "
            "each query token, in words of 64"
        )
    if ancestors.dtype != torch.int64:
        raise AttentionError(f"ancestors has dtype {ancestors.dtype}; expected int64")
    if words > 1 and ancestors.stride(-1) != 1:
        raise AttentionError(
            f"ancestors has stride {ancestors.stride(-1)} in its last dimension; expected 1"
        )
    _check_device(device, ancestors=ancestors)


def check_scales(
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    *,
    eight_bits: bool,
    device: torch.device,
) -> None:
    """Refuse scales that do not fit the cache or the device.

    Raises
    ------
    AttentionError
        For the first scale that does not fit.
    """
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        is_tensor = isinstance(scale, torch.Tensor)
        if not eight_bits and (is_tensor or scale != 1.0):
            raise AttentionError(
                f"{name} is given, but the KV cache has the dtype of the queries; only a cache of "
                "8 bits has scales: leave it out, or set kv_dtype"
            )
        if isinstance(scale, torch.Tensor):
            if scale.numel() != 1 or scale.dtype != torch.float32:
                raise AttentionError(
                    f"{name} has shape {list(scale.shape)} and dtype {scale.dtype}; expected one "
                    "number of torch.float32"
                )
            _check_device(device, **{name: scale})
        elif not 0.0 < scale < math.inf:
            raise AttentionError(f"{name} is {scale}; expected a number above 0")


def check_sinks(sinks: torch.Tensor, num_query_heads: int, device: torch.device) -> None:
    """Refuse sinks that do not fit the heads or the device.

    Raises
    ------
    AttentionError
        If shape, strides, dtype or device do not fit.
    """
    if sinks.shape != (num_query_heads,) or not sinks.is_contiguous():
        raise AttentionError(
            f"sinks has shape {list(sinks.shape)} and strides {sinks.stride()}; expected "
            f"[{num_query_heads}], contiguous"
        )
    if sinks.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise AttentionError(
            f"sinks has dtype {sinks.dtype}; expected float32, bfloat16 or float16"
        )
    _check_device(device, sinks=sinks)


def check_batch(
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    table_rows: torch.Tensor,
    device: torch.device,
) -> None:
    """Refuse a page table, lengths or rows that the device planner cannot plan from.

    Raises
    ------
    AttentionError
        For the first tensor that does not fit.
    """
    _check_lists(len(seq_lens), seq_lens=seq_lens, table_rows=table_rows)
    integers = {"page_table": page_table, "seq_lens": seq_lens, "table_rows": table_rows}
    _check_integers(**integers)
    _check_device(device, **integers)
    _check_table(page_table)


def _check_operand(
    name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    if tensor.shape != shape:
        raise AttentionError(f"{name} has shape {list(tensor.shape)}; expected {list(shape)}")
    if tensor.dtype != dtype:
        raise AttentionError(f"{name} has dtype {tensor.dtype}; expected {dtype}")
    if tensor.stride(-1) != 1:
        raise AttentionError(
            f"{name} has stride {tensor.stride(-1)} in its last dimension; expected 1"
        )


def _check_table(page_table: torch.Tensor) -> None:
    if page_table.dim() != 2 or page_table.stride(1) != 1:
        raise AttentionError(
            f"page_table has shape {list(page_table.shape)} and strides {page_table.stride()}; "
            "expected [rows, pages] with contiguous rows"
        )


def _check_lists(length: int, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.shape != (length,):
            raise AttentionError(f"{name} has shape {list(tensor.shape)}; expected [{length}]")
        if length > 1 and tensor.stride(0) != 1:
            raise AttentionError(
                f"{name} has stride {tensor.stride(0)}; expected 1: make it contiguous"
            )


def _check_integers(**tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.dtype not in (torch.int32, torch.int64):
            raise AttentionError(f"{name} has dtype {tensor.dtype}; expected int32 or int64")


def _check_device(device: torch.device, **tensors: torch.Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.device != device:
            raise AttentionError(f"{name} is on {tensor.device}; expected {device}")
