"""Large tiles: their products, the online softmax between them, and the results (Gluon)."""

from __future__ import annotations

from deft_backend.kernels.hopper.eight_bits import as_operand
from deft_backend.kernels.hopper.large_tile_copies import arrived, read_rows
from deft_backend.kernels.hopper.parts import (
    larger,
    plus,
    show_operands,
    sink_weight,
    weights_of,
)
from deft_backend.kernels.hopper.versions import (
    barrier,
    gl,
    jit,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_wait,
)


@jit
def _by_thread(x, ROWS, COLUMNS):
    """Reshape [ROWS, COLUMNS] so that one axis counts the 4 threads that share a row.

    A thread of a matrix product's result holds two neighbours in every eight columns. A reduction
    of this shape is several short chains of operations, which keep the arithmetic units filled.
    """
    return gl.reshape(x, [ROWS, 4, COLUMNS // 32, 4, 2])


@jit
def _row_max(x, ROWS, COLUMNS):
    x = _by_thread(x, ROWS, COLUMNS)
    x = gl.reduce(gl.reduce(gl.reduce(x, 2, larger), 1, larger), 2, larger)
    return gl.reduce(x, 1, larger)


@jit
def _thread_sum(x, ROWS, COLUMNS):
    """[ROWS, 4]: the sum over the columns that each of a row's 4 threads holds."""
    x = _by_thread(x, ROWS, COLUMNS)
    return gl.reduce(gl.reduce(gl.reduce(x, 2, plus), 1, plus), 2, plus)


@jit
def softmax(scores, maximum, factor, ROWS, COLUMNS, ROW):
    """The weights of one block, their sums by thread, the new row maxima, and factors that bring
    earlier weights to these. `factor` brings scores to base 2.
    """
    highest = _row_max(scores, ROWS, COLUMNS)
    new_maximum = gl.maximum(maximum, gl.convert_layout(highest, ROW) * factor)
    # A query vector that has seen no token keeps its maximum at -inf: avoid -inf - -inf.
    reference = gl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    weights = weights_of(scores, factor, reference[:, None])
    rescale = gl.exp2(maximum - reference)
    return weights, _thread_sum(weights, ROWS, COLUMNS), new_maximum, rescale


@jit
def settled(sums):
    """Return `sums`, and keep the wait that follows behind the softmax.

    P V of the block before shall run during the softmax, but the assembler would move the wait for
    it up, ahead of everything that does not need the product. It moves no wait ahead of a store. So
    this function stores, under a condition that never holds: the sign bit of a sum of powers of
    two. The assembler does not know that this bit is never set, as it would know of a comparison
    with 0.
    """
    return gl.inline_asm_elementwise(
        """{
        .reg .pred below;
        .reg .b32 nowhere, bits;
        mov.u32 nowhere, 0;
        mov.b32 bits, $1;
        setp.lt.s32 below, bits, 0;
        @below st.shared.b32 [nowhere], bits;
        mov.b32 $0, $1;
        }""",
        "=f,f",
        [sums],
        dtype=gl.float32,
        is_pure=False,
        pack=1,
    )


@jit
def add_rescaled(total, rescale, added):
    """Sums by thread, with the sums of one more block added."""
    ROW: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    return gl.fma(total, gl.convert_layout(rescale, ROW)[:, None], added)


@jit
def start_products(state, q, buffers, CACHE, TILE, LAYOUT):
    """Start Q K^T of the next block, and P V of the block taken before it."""
    EXPONENT_BITS: gl.constexpr = CACHE.exponent_bits
    BLOCK_M: gl.constexpr = TILE.height
    BLOCK_N: gl.constexpr = TILE.block_tokens
    # Allow this many copies in flight when waiting for the next K block; its V block was issued
    # earlier and has arrived.
    OUTSTANDING: gl.constexpr = 2 * TILE.lookahead - 2
    no_scores = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LAYOUT.scores)
    arrived(OUTSTANDING)
    keys, values = buffers.k.index(state.following), buffers.v.index(state.now)
    if EXPONENT_BITS > 0:
        keys = as_operand(keys, buffers.key_operand, EXPONENT_BITS, LAYOUT)
        values = as_operand(values, buffers.value_operand, EXPONENT_BITS, LAYOUT)
        show_operands()
    started = warpgroup_mma(q, keys.permute((1, 0)), no_scores, use_acc=False, is_async=True)
    return started, warpgroup_mma(state.weights, values, state.acc, is_async=True)


@jit
def add_scores(state, scores, summing, inputs, TILE, MODE, LAYOUT):
    """The softmax with one more block; P V of the block before, `summing`, runs meanwhile."""
    DTYPE: gl.constexpr = inputs.buffers.rows.dtype
    BLOCK_M: gl.constexpr = TILE.height
    BLOCK_N: gl.constexpr = TILE.block_tokens
    ROW: gl.constexpr = LAYOUT.row
    factor = inputs.scaling.scale
    if MODE.soft_cap:
        factor = 1.0
    fresh, added, maximum, rescale = softmax(scores, state.maximum, factor, BLOCK_M, BLOCK_N, ROW)
    total = add_rescaled(state.total, rescale, settled(added))
    acc, _, fresh = warpgroup_mma_wait(0, deps=[summing, state.weights, fresh])
    weights = gl.convert_layout(fresh.to(DTYPE), LAYOUT.weights)
    acc = acc * gl.convert_layout(rescale, LAYOUT.output_row)[:, None]
    return maximum, total, acc, weights


@jit
def first_product(q, buffers, CACHE, TILE, LAYOUT):
    """Q K^T of an item's first block."""
    EXPONENT_BITS: gl.constexpr = CACHE.exponent_bits
    BLOCK_M: gl.constexpr = TILE.height
    BLOCK_N: gl.constexpr = TILE.block_tokens
    no_scores = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, LAYOUT.scores)
    keys = buffers.k.index(0)
    if EXPONENT_BITS > 0:
        keys = as_operand(keys, buffers.key_operand, EXPONENT_BITS, LAYOUT)
        show_operands()
    return warpgroup_mma(q, keys.permute((1, 0)), no_scores, use_acc=False)


@jit
def last_product(state, scaling, buffers, CACHE, LAYOUT):
    """The sum of values with P V of an item's last block."""
    EXPONENT_BITS: gl.constexpr = CACHE.exponent_bits
    values = buffers.v.index(state.now)
    if EXPONENT_BITS > 0:
        values = as_operand(values, buffers.value_operand, EXPONENT_BITS, LAYOUT)
        show_operands()
    acc = warpgroup_mma(state.weights, values, state.acc)
    if EXPONENT_BITS > 0:
        acc = acc * scaling.value
    return acc


@jit
def masked(scores, tokens, ROWS, COLUMNS, LAYOUT):
    """Scores with -inf in the columns from `tokens` on.

    The mask works on groups of eight columns. Every thread has columns of each group, so group
    numbers are constants.
    """
    groups = gl.reshape(scores, [ROWS, COLUMNS // 8, 8])
    GROUPS: gl.constexpr = groups.type.layout
    group = gl.arange(0, COLUMNS // 8, layout=gl.SliceLayout(0, gl.SliceLayout(2, GROUPS)))
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, GROUPS)))
    left = gl.expand_dims(gl.expand_dims(tokens - group * 8, 0), 2)
    blocks = gl.expand_dims(gl.expand_dims(column, 0), 1) < left
    groups = gl.where(blocks, groups, float("-inf"))
    return gl.convert_layout(gl.reshape(groups, [ROWS, COLUMNS]), LAYOUT.scores)


@jit
def write_results(
    acc, maximum, sums, item, kv_head, zero, buffers, tensors, HEADS, TILE, MODE, LAYOUT
):
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
        tensors.out.to(gl.pointer_type(gl.int16), bitcast=True) + elements,
        bits,
        mask=(in_tile & (at < 0))[:, None],
    )
    gl.store(
        tensors.partial.out.to(gl.pointer_type(gl.int16), bitcast=True) + elements,
        bits,
        mask=(in_tile & (at >= 0))[:, None],
    )
    barrier()  # the next item's Q comes into the same memory
