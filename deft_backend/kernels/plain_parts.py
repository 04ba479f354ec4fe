"""What the plain kernels share: scales, soft cap and sinks, and how queries and results move."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton import jit

from deft_backend.kernels.arguments import Scaling


class Online(NamedTuple):
    """The softmax of an item's tokens so far, for M query vectors."""

    acc: Any
    """Sums of values, weighted by ``2^(score - maximum)``: [M, D], or transposed."""
    maximum: Any
    """[M]: largest scores, in base 2."""
    total: Any
    """[M]: sums of weights."""


@jit
def with_device_scales(scaling, tensors, MODE: tl.constexpr):
    """The scaling, times the scales of an 8-bit cache that the device holds."""
    scale, value = scaling.scale, scaling.value
    if MODE.device_scales:
        scale *= tl.load(tensors.k_scale)
        value *= tl.load(tensors.v_scale)
    return Scaling(scale, scaling.cap, value)


@jit
def capped(products, scaling, SOFT_CAP: tl.constexpr):
    """Scores of products of queries and keys, and the factor that brings them to base 2."""
    if SOFT_CAP:
        # tanh through exp: saturates to +-1 without overflow in either direction.
        LOG2_E: tl.constexpr = 1.4426950408889634
        doubled = tl.exp2(products * (scaling.scale * 2.0 * LOG2_E / scaling.cap))
        products = (scaling.cap * LOG2_E) * (1.0 - 2.0 / (doubled + 1.0))
        factor = 1.0
    else:
        factor = scaling.scale
    return products, factor


@jit
def load_queries(tensors, strides, query, head, in_tile, HEADS: tl.constexpr, UPCAST: tl.constexpr):
    """[M, D]: the query vector of each query and query head; 0 outside the tile."""
    offs_d = tl.arange(0, HEADS.padded_dim)[None, :]
    q = tl.load(
        tensors.q
        + query.to(tl.int64)[:, None] * strides.q_batch
        + head[:, None] * strides.q_head
        + offs_d,
        mask=in_tile[:, None] & (offs_d < HEADS.dim),
        other=0.0,
    )
    if UPCAST:
        q = q.to(tl.float32)
    return q


@jit
def kv_offsets(page, position, CACHE: tl.constexpr):
    """Offsets of tokens in the caches of K and V, in elements."""
    in_page = position % CACHE.page_size
    page = page.to(tl.int64)
    k_offset = page * CACHE.k_page + in_page * CACHE.k_token
    return k_offset, page * CACHE.v_page + in_page * CACHE.v_token


@jit
def sink_weight(sinks, head, there, maximum):
    """The weight of each query vector's sink, among weights relative to `maximum`, in base 2.

    Without a token `maximum` is -inf: then any finite weight gives an output of 0.
    """
    LOG2_E: tl.constexpr = 1.4426950408889634
    sink = tl.load(sinks + head, mask=there, other=0.0).to(tl.float32) * LOG2_E
    return tl.exp2(sink - tl.where(maximum == float("-inf"), 0.0, maximum))


@jit
def write_results(
    online, query, slot, head, in_tile, tensors, strides, HEADS: tl.constexpr, MODE: tl.constexpr
):
    """Write each query vector's output, or its partial result to its slot.

    `online.acc` is [M, D]. An empty range contributes nothing: O = 0, LSE = -inf. An output has
    its sink; the merge of partial results adds theirs.
    """
    acc, maximum, total = online.acc, online.maximum, online.total
    offs_d = tl.arange(0, HEADS.padded_dim)[None, :]
    in_head = offs_d < HEADS.dim
    safe_total = tl.where(total > 0.0, total, 1.0)
    normal = 1.0 / safe_total
    direct = in_tile & (slot < 0)
    partial = in_tile & (slot >= 0)
    if tl.reduce(direct.to(tl.int32), 0, tl.standard._elementwise_max) > 0:
        whole = normal
        if MODE.sinks:
            whole = 1.0 / (safe_total + sink_weight(tensors.sinks, head, in_tile, maximum))
        tl.store(
            tensors.out
            + query.to(tl.int64)[:, None] * strides.out_batch
            + head[:, None] * strides.out_head
            + offs_d,
            (acc * whole[:, None]).to(tensors.out.dtype.element_ty),
            mask=direct[:, None] & in_head,
        )
    if tl.reduce(partial.to(tl.int32), 0, tl.standard._elementwise_max) > 0:
        # A partial result is stored relative to its largest element: this keeps 11 bits of
        # mantissa, whatever the range of the cache's dtype.
        largest = tl.reduce(tl.abs(acc), 1, tl.standard._elementwise_max)
        largest = tl.maximum(largest, 1.0e-30)
        at = slot.to(tl.int64) * (HEADS.num_kv * HEADS.group) + head
        tl.store(
            tensors.partial.out + at[:, None] * HEADS.dim + offs_d,
            (acc * (1.0 / largest)[:, None]).to(tensors.partial.out.dtype.element_ty),
            mask=partial[:, None] & in_head,
        )
        lse = tl.where(total > 0.0, maximum + tl.log2(safe_total), float("-inf"))
        tl.store(tensors.partial.lse + at, lse, mask=partial)
        tl.store(tensors.partial.scale + at, largest * normal, mask=partial)
