"""Results of large tiles: outputs, and partial results for a later merge (Gluon)."""

from __future__ import annotations

from deft_backend.kernels.hopper.large_tile.copies import read_rows
from deft_backend.kernels.hopper.parts import larger, sink_weight
from deft_backend.kernels.hopper.versions import barrier, gl, jit, reinterpret


@jit
def write_results(
    acc, maximum, sums, item, kv_head, zero, buffers, tensors, HEADS: gl.constexpr,
    TILE: gl.constexpr, MODE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Write each query vector's output, or its partial result, where `result_place` says.

    `acc` [M, D] is the sum of values, weighted by ``2^(score - maximum)``; `sums` [M] are the sums
    of these weights. An empty range contributes nothing: O = 0, LSE = -inf.
    """
    BLOCK_M: gl.constexpr = TILE.height
    HEAD_DIM: gl.constexpr = HEADS.dim
    ROW: gl.constexpr = LAYOUT.row
    OUTPUT_ROW: gl.constexpr = LAYOUT.output_row
    COPY_ROW: gl.constexpr = LAYOUT.copy_row
    MATRIX: gl.constexpr = LAYOUT.matrix
    DTYPE: gl.constexpr = tensors.out.dtype.element_ty
    PARTIAL: gl.constexpr = tensors.partial.out.dtype.element_ty
    gl.static_assert(tensors.partial.out.dtype.element_ty == gl.float16)
    empty = sums == 0.0
    lse = gl.where(empty, float("-inf"), maximum + gl.log2(sums))
    inverse = gl.where(empty, 0.0, 1.0 / sums)
    inverse = gl.convert_layout(inverse, OUTPUT_ROW)
    # A partial result is stored relative to its largest element: this keeps 11 bits of mantissa,
    # whatever the range of the cache's dtype. In float16 its half always fits: the mean of V under
    # rounded weights may exceed the range, but never twice the range.
    largest = gl.full([BLOCK_M], 2.0, gl.float32, OUTPUT_ROW)
    if DTYPE != PARTIAL:
        largest = gl.maximum(gl.reduce(gl.abs(acc), 1, larger) * inverse, 1.0e-30)

    # The memory of Q turns the results into whole rows: threads side by side write side by side.
    row_at = read_rows(buffers.places.index(1), OUTPUT_ROW, LAYOUT.at_once)
    whole = inverse
    if MODE.sinks:
        row = gl.arange(0, BLOCK_M, layout=ROW) + zero
        head = kv_head * HEADS.group + row % HEADS.group
        sums += sink_weight(tensors.sinks, head, row < item.queries * HEADS.vectors, maximum)
        whole = gl.convert_layout(gl.where(empty, 0.0, 1.0 / sums), OUTPUT_ROW)
    result = acc * gl.where(row_at < 0, whole, inverse / largest)[:, None]
    bits = result.to(PARTIAL).to(gl.int16, bitcast=True)
    if DTYPE != PARTIAL:
        direct_bits = result.to(DTYPE).to(gl.int16, bitcast=True)
        bits = gl.where((row_at < 0)[:, None], direct_bits, bits)
    rows = reinterpret(buffers.rows, gl.int16, [BLOCK_M, HEAD_DIM], MATRIX)
    barrier()  # Q has been read
    rows.store(bits)
    offs_m = gl.arange(0, BLOCK_M, layout=OUTPUT_ROW) + zero
    partial = (offs_m < item.queries * HEADS.vectors) & (row_at >= 0)
    slot_at = row_at // (HEAD_DIM // 8)
    gl.store(tensors.partial.scale + slot_at, largest, mask=partial)
    gl.store(tensors.partial.lse + slot_at, gl.convert_layout(lse, OUTPUT_ROW), mask=partial)
    barrier()
    bits = rows.load(LAYOUT.copy)
    at = read_rows(buffers.places.index(1), COPY_ROW, LAYOUT.at_once)
    offs_m = gl.arange(0, BLOCK_M, layout=COPY_ROW) + zero
    offs_d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, LAYOUT.copy))
    in_tile = offs_m < item.queries * HEADS.vectors
    if not HEADS.single:
        in_tile = in_tile & (at != -1)
    elements = (at & 0x7FFFFFFF).to(gl.int64)[:, None] * 8 + offs_d[None, :]
    gl.store(
        tensors.out.to(gl.pointer_type(gl.int16), bitcast=True) + elements, bits,
        mask=(in_tile & (at < 0))[:, None],
    )  # fmt: skip
    gl.store(
        tensors.partial.out.to(gl.pointer_type(gl.int16), bitcast=True) + elements, bits,
        mask=(in_tile & (at >= 0))[:, None],
    )  # fmt: skip
    barrier()  # the next item's Q comes into the same memory
