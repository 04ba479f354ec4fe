"""Checks of an attention's shape and of a step's tensors, before any kernel runs."""

from __future__ import annotations

import math

import torch

from deft_backend.kernels import EXPONENT_BITS, Gpu, unsupported
from deft_backend.shapes.attention_shape import AttentionShape
from deft_backend.shapes.kernel_limits import MAX_QUERY_TOKENS


class AttentionError(ValueError):
    """The kernels cannot run this attention, or the tensors do not fit the plan."""


def check_attention(
    shape: AttentionShape, *, max_batch: int, query_tokens: int, gpu: Gpu | None
) -> None:
    """Refuse an attention that the kernels cannot run: on its device, on `gpu`, or at all.

    Raises
    ------
    AttentionError
        The message names the value and the supported ones.
    """
    reason = unsupported(
        shape.num_query_heads, shape.num_kv_heads, shape.head_dim, shape.dtype, shape.device, gpu,
        kv_dtype=shape.kv_dtype,
    )  # fmt: skip
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
    shape: AttentionShape,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    table_rows: torch.Tensor,
    out: torch.Tensor,
    *,
    requests: int,
    rows: int,
    query_tokens: int,
    query_start: torch.Tensor | None,
    ancestors: torch.Tensor | None,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    sinks: torch.Tensor | None,
) -> None:
    """Refuse inputs of a step that do not fit one another, the plan or the device.

    `rows` are the query tokens in `q` and `out`, `query_tokens` the most of a request. The caches
    have pages: [pages, page_size, Hkv, D].

    Raises
    ------
    AttentionError
        For the first input that does not fit.
    """
    queries = (rows, shape.num_query_heads, shape.head_dim)
    page = (shape.page_size, shape.num_kv_heads, shape.head_dim)
    for name, tensor in (("q", q), ("out", out)):
        _check_operand(name, tensor, queries, shape.dtype)
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        _check_operand(name, tensor, (*tensor.shape[:1], *page), shape.kv_dtype)
    check_batch(page_table, seq_lens, table_rows, shape.device, requests)
    _check_device(shape.device, q=q, out=out, k_cache=k_cache, v_cache=v_cache)
    _check_scales(shape, k_scale, v_scale)
    if sinks is not None:
        _check_sinks(shape, sinks)
    if query_start is not None:
        _check_query_start(query_start, requests, shape.device)
    if ancestors is not None:
        _check_ancestors(ancestors, requests, query_tokens, shape.device)


def check_batch(
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    table_rows: torch.Tensor,
    device: torch.device,
    requests: int | None = None,
) -> None:
    """Refuse a page table, lengths or rows that do not fit one another or the device.

    `requests` is their number; default: that of `seq_lens`.

    Raises
    ------
    AttentionError
        For the first tensor that does not fit.
    """
    _check_table(page_table)
    count = len(seq_lens) if requests is None else requests
    _check_lists(count, seq_lens=seq_lens, table_rows=table_rows)
    integers = {"page_table": page_table, "seq_lens": seq_lens, "table_rows": table_rows}
    _check_integers(**integers)
    _check_device(device, **integers)


def _check_query_start(query_start: torch.Tensor, batch: int, device: torch.device) -> None:
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


def _check_ancestors(
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


def _check_scales(
    shape: AttentionShape, k_scale: float | torch.Tensor, v_scale: float | torch.Tensor
) -> None:
    """Refuse scales that do not fit the cache or the device.

    Raises
    ------
    AttentionError
        For the first scale that does not fit.
    """
    eight_bits = shape.kv_dtype in EXPONENT_BITS
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
            _check_device(shape.device, **{name: scale})
        elif not 0.0 < scale < math.inf:
            raise AttentionError(f"{name} is {scale}; expected a number above 0")


def _check_sinks(shape: AttentionShape, sinks: torch.Tensor) -> None:
    """Refuse sinks that do not fit the heads or the device.

    Raises
    ------
    AttentionError
        If shape, strides, dtype or device do not fit.
    """
    if sinks.shape != (shape.num_query_heads,) or not sinks.is_contiguous():
        raise AttentionError(
            f"sinks has shape {list(sinks.shape)} and strides {sinks.stride()}; expected "
            f"[{shape.num_query_heads}], contiguous"
        )
    if sinks.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise AttentionError(
            f"sinks has dtype {sinks.dtype}; expected float32, bfloat16 or float16"
        )
    _check_device(shape.device, sinks=sinks)


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
