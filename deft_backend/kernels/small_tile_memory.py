"""Registers and shared memory of a program of the small tile on Hopper (Gluon)."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

from deft_backend.kernels.gluon_versions import constexpr_function, jit, reinterpret

with suppress(ImportError):  # `available` says so before anything is launched
    from triton.experimental.gluon import language as gl


class Layout(NamedTuple):
    """Constants: layouts in registers and shared memory, and lengths of the rings of buffers."""

    product: Any
    """A matrix product's result: scores are [tokens, rows], outputs [dimensions, rows]."""
    left: Any
    right: Any
    """Operands of the products."""
    keys: Any
    queries: Any
    """Operands of the first product. A register of keys holds four bytes or two of 16 bits."""
    token: Any
    column: Any
    """One number for each token, or for each row, as `product` holds it."""
    copy: Any
    """Whole rows side by side, 16 bytes a thread."""
    copy_row: Any
    copy_dim: Any
    kv_row: Any
    kv_dim: Any
    """The same for keys and values, which may have elements of another size."""
    kv_unit: int
    """Elements of keys and values in 16 bytes."""
    each: Any
    """One number a thread."""
    matrix: Any
    """Shared memory of queries, keys and values, in elements of 16 bits."""
    kv_matrix: Any
    """Shared memory of keys and values, in their own elements."""
    result: Any
    """Shared memory of the results."""
    plain: Any
    """Shared memory of numbers."""
    slots: int
    """Blocks of Q, of K and of V: the block being multiplied and those on their way."""
    in_place: bool
    """Whether the results fit where the item's last block of K was."""
    query_rows: int
    """Rows that one query fills, rounded up to a power of two."""


@constexpr_function
def layout_of(head_dim, query_vectors, height, block_tokens, lookahead, exponent_bits):
    """The layout for a head dimension, the query vectors of a query that share a KV head, a tile's
    height, tokens of a block, blocks copied ahead, and the exponent's bits in a cache of 8 bits."""
    product = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    copy = gl.BlockedLayout([1, 8], [256 // head_dim, head_dim // 8], [1, 1], [1, 0])
    unit = 16 if exponent_bits else 8
    kv_copy = gl.BlockedLayout([1, unit], [32 * unit // head_dim, head_dim // unit], [1, 1], [1, 0])
    layout = Layout(
        product=product,
        left=gl.DotOperandLayout(0, product, 2),
        right=gl.DotOperandLayout(1, product, 2),
        keys=gl.DotOperandLayout(0, product, unit // 4),
        queries=gl.DotOperandLayout(1, product, unit // 4),
        token=gl.SliceLayout(1, product),
        column=gl.SliceLayout(0, product),
        copy=copy,
        copy_row=gl.SliceLayout(1, copy),
        copy_dim=gl.SliceLayout(0, copy),
        kv_row=gl.SliceLayout(1, kv_copy),
        kv_dim=gl.SliceLayout(0, kv_copy),
        kv_unit=unit,
        each=gl.BlockedLayout([1], [32], [1], [0]),
        matrix=gl.SwizzledSharedLayout(8, 1, 8, [1, 0]),
        kv_matrix=gl.SwizzledSharedLayout(unit, 1, 8, [1, 0]),
        result=gl.SwizzledSharedLayout(4, 1, 8, [1, 0]),
        plain=gl.SwizzledSharedLayout(1, 1, 1, [0]),
        slots=lookahead + 1,
        in_place=4 * block_tokens >= height * unit,
        query_rows=min(1 << (query_vectors - 1).bit_length(), height),
    )
    # Each as a constant of its own: Triton 3.6 passes nothing else on to functions.
    return Layout(*map(gl.constexpr, layout))


class Buffers(NamedTuple):
    """A program's shared memory."""

    q: Any
    """[slots, M, D]: a ring of items' queries."""
    k: Any
    v: Any
    """[slots, tokens, D]: rings of KV blocks."""
    acc: Any
    """[M, D] float32: results as whole rows, unless their place is a block of K."""
    maximum: Any
    total: Any
    """[M] float32: the online softmax of each row."""


@jit
def allocate(tensors, HEADS: gl.constexpr, TILE: gl.constexpr, LAYOUT: gl.constexpr):
    """Allocate a program's shared memory."""
    DTYPE: gl.constexpr = tensors.q.dtype.element_ty
    STORED: gl.constexpr = tensors.k.dtype.element_ty
    BLOCK_M: gl.constexpr = TILE.height
    BLOCK_N: gl.constexpr = TILE.block_tokens
    HEAD_DIM: gl.constexpr = HEADS.dim
    SLOTS: gl.constexpr = LAYOUT.slots
    q = gl.allocate_shared_memory(DTYPE, [SLOTS, BLOCK_M, HEAD_DIM], LAYOUT.matrix)
    k = gl.allocate_shared_memory(STORED, [SLOTS, BLOCK_N, HEAD_DIM], LAYOUT.kv_matrix)
    v = gl.allocate_shared_memory(STORED, [SLOTS, BLOCK_N, HEAD_DIM], LAYOUT.kv_matrix)
    if LAYOUT.in_place:
        acc = _place_in_k(k, 0, HEADS, TILE, LAYOUT)
    else:
        acc = gl.allocate_shared_memory(gl.float32, [BLOCK_M, HEAD_DIM], LAYOUT.result)
    maximum = gl.allocate_shared_memory(gl.float32, [BLOCK_M], LAYOUT.plain)
    total = gl.allocate_shared_memory(gl.float32, [BLOCK_M], LAYOUT.plain)
    return Buffers(q, k, v, acc, maximum, total)


@jit
def _place_in_k(k, slot, HEADS: gl.constexpr, TILE: gl.constexpr, LAYOUT: gl.constexpr):
    ROWS: gl.constexpr = TILE.block_tokens * 4 // LAYOUT.kv_unit
    HEAD_DIM: gl.constexpr = HEADS.dim
    RESULT: gl.constexpr = LAYOUT.result
    block = reinterpret(k.index(slot), gl.float32, [ROWS, HEAD_DIM], RESULT)
    return block.slice(0, TILE.height)


@jit
def place_of_results(buffers, slot, HEADS: gl.constexpr, TILE: gl.constexpr, LAYOUT: gl.constexpr):
    """[M, D] float32: where an item's results go, whose last block of K is in `slot`."""
    place = buffers.acc
    if LAYOUT.in_place:
        place = _place_in_k(buffers.k, slot, HEADS, TILE, LAYOUT)
    return place
