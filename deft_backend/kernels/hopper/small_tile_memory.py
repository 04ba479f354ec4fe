"""Registers and shared memory of a program of the small tile on Hopper (Gluon)."""

from __future__ import annotations

from typing import Any, NamedTuple

from deft_backend.kernels.hopper.versions import constexpr_function, gl, jit, reinterpret


class Layout(NamedTuple):
    """Constants: layouts in registers and shared memory, and lengths of the rings of buffers."""

    product: Any  # A matrix product's result: scores are [tokens, rows], outputs [dimensions, rows]
    left: Any
    right: Any  # operands of the products
    keys: Any
    queries: Any
    """Operands of the first product. A register of keys holds four bytes or two of 16 bits."""
    token: Any
    column: Any  # one number for each token, or for each row, as `product` holds it
    copy: Any  # whole rows side by side, 16 bytes a thread
    copy_row: Any
    copy_dim: Any
    kv_row: Any
    kv_dim: Any  # the same for keys and values, which may have elements of another size
    kv_unit: int  # elements of keys and values in 16 bytes
    each: Any  # one number a thread
    matrix: Any  # shared memory of queries, keys and values, in elements of 16 bits
    kv_matrix: Any  # shared memory of keys and values, in their own elements
    result: Any  # shared memory of the results
    plain: Any  # shared memory of numbers
    slots: int  # blocks of Q, of K and of V: the block being multiplied and those on their way
    query_rows: int  # rows that one query fills, rounded up to a power of two


@constexpr_function
def layout_of(head_dim, query_vectors, height, lookahead, exponent_bits):
    """The layout of a program's registers and shared memory, for `query_vectors` of a query that
    share a KV head, `lookahead` blocks copied ahead, and a cache of 8 bits' `exponent_bits`.
    """
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
        query_rows=min(1 << (query_vectors - 1).bit_length(), height),
    )
    # Each as a constant of its own: Triton 3.6 passes nothing else on to functions.
    return Layout(*map(gl.constexpr, layout))


class Buffers(NamedTuple):
    q: Any  # [slots, M, D]: a ring of items' queries
    kv: Any  # [2 slots, tokens, D]: a ring of KV blocks, K before V
    results: Any
    """[places, M, D] float32: the same memory. An item's results go where its last KV block
    was."""
    maximum: Any
    total: Any  # [M] float32: the online softmax of each row


@jit
def allocate(tensors, HEADS, TILE, LAYOUT):
    DTYPE: gl.constexpr = tensors.q.dtype.element_ty
    STORED: gl.constexpr = tensors.k.dtype.element_ty
    BLOCK_M: gl.constexpr = TILE.height
    BLOCK_N: gl.constexpr = TILE.block_tokens
    HEAD_DIM: gl.constexpr = HEADS.dim
    SLOTS: gl.constexpr = LAYOUT.slots
    PLACES: gl.constexpr = SLOTS * _places(TILE, LAYOUT)
    q = gl.allocate_shared_memory(DTYPE, [SLOTS, BLOCK_M, HEAD_DIM], LAYOUT.matrix)
    kv = gl.allocate_shared_memory(STORED, [2 * SLOTS, BLOCK_N, HEAD_DIM], LAYOUT.kv_matrix)
    results = reinterpret(kv, gl.float32, [PLACES, BLOCK_M, HEAD_DIM], LAYOUT.result)
    maximum = gl.allocate_shared_memory(gl.float32, [BLOCK_M], LAYOUT.plain)
    total = gl.allocate_shared_memory(gl.float32, [BLOCK_M], LAYOUT.plain)
    return Buffers(q, kv, results, maximum, total)


@constexpr_function
def _places(tile, layout):
    """How many tiles' results fit one KV block, K and V."""
    rows = 8 * tile.block_tokens // layout.kv_unit
    assert rows >= tile.height
    return rows // tile.height


@jit
def keys_of(buffers, slot):
    """[tokens, D]: the block of K in a slot."""
    return buffers.kv.index(2 * slot)


@jit
def values_of(buffers, slot):
    """[tokens, D]: the block of V in a slot."""
    return buffers.kv.index(2 * slot + 1)


@jit
def place_of_results(buffers, slot, TILE, LAYOUT):
    """[M, D] float32: where an item's results go, whose last KV block is in `slot`."""
    PLACES: gl.constexpr = _places(TILE, LAYOUT)
    return buffers.results.index(PLACES * slot)
