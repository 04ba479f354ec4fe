"""What becomes of a leaf's result in shared memory: merged with others, or written (Gluon)."""

from __future__ import annotations

from contextlib import suppress

from deft_backend.kernels.gluon_parts import jit, larger, plus

with suppress(ImportError):  # `available` says so before anything is launched
    from triton.experimental.gluon import language as gl


@jit
def _add_partial(
    result, factor, row, there, out_ptr, offs_d, HEAD_DIM: gl.constexpr
):  # fmt: skip
    """Add a partial result of each row, `row` of the workspace, times its factor.

    The workspace holds far fewer than 2^31 units of 16 bytes.
    """
    at = (row * (HEAD_DIM // 8)).to(gl.uint32).to(gl.int64) * 8
    out = gl.load(out_ptr + at[:, None] + offs_d[None, :], mask=there[:, None], other=0.0)
    return result + out.to(gl.float32) * factor[:, None]


@jit
def _add_partials(
    result, weights, first_row, in_group, merged, out_ptr, offs_d, MOST: gl.constexpr,
    NUM_HEADS: gl.constexpr, HEAD_DIM: gl.constexpr, ROW: gl.constexpr,
):  # fmt: skip
    """The same for the first `merged` of MOST partial results, whose loads are issued together."""
    for index in gl.static_range(MOST):
        result = _add_partial(
            result, weights.index(index).load(ROW), first_row + index * NUM_HEADS,
            in_group & (index < merged), out_ptr, offs_d, HEAD_DIM,
        )  # fmt: skip
    return result


@jit
def merge_results(
    acc_shared, factors, maximum, total, first_slot, query, kv_head, merged, out_ptr,
    partial_out_ptr, partial_lse_ptr, partial_scale_ptr, stride_out_batch, stride_out_head, offs_d,
    NUM_HEADS: gl.constexpr, GQA_GROUP: gl.constexpr, BLOCK_M: gl.constexpr, ROWS: gl.constexpr,
    HEAD_DIM: gl.constexpr, RESULT: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """Merge the result of an item of one query with those from `first_slot` on; write its output.

    First what each of them weighs (DeFT, equation 1), one number a thread, then their sum. Of the
    item's tile, only the ROWS that its query fills are looked at.
    """
    PARTS: gl.constexpr = 8
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    ROW: gl.constexpr = gl.SliceLayout(1, COPY)
    THREADS: gl.constexpr = ROWS if ROWS > 4 else 4
    WEIGH: gl.constexpr = gl.BlockedLayout(
        [1, THREADS // 4], [THREADS, 32 // THREADS], [1, 1], [1, 0]
    )
    WEIGH_ROW: gl.constexpr = gl.SliceLayout(1, WEIGH)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    head = kv_head * GQA_GROUP + gl.arange(0, ROWS, layout=WEIGH_ROW)
    part = gl.arange(0, PARTS, layout=gl.SliceLayout(0, WEIGH))
    there = (gl.arange(0, ROWS, layout=WEIGH_ROW) < GQA_GROUP)[:, None] & (part < merged)[None, :]
    at = ((first_slot + part) * NUM_HEADS)[None, :] + head[:, None]
    lse = gl.load(partial_lse_ptr + at, mask=there, other=float("-inf"))
    scale = gl.load(partial_scale_ptr + at, mask=there, other=0.0)

    row = gl.arange(0, ROWS, layout=ROW)
    in_group = row < GQA_GROUP
    row_head = kv_head * GQA_GROUP + row
    at_row = first_slot * NUM_HEADS + row_head
    tiles = acc_shared._reinterpret(gl.float32, [BLOCK_M // ROWS, ROWS, HEAD_DIM], RESULT)
    result = tiles.index(0).load(COPY)
    own_maximum = maximum.slice(0, ROWS).load(WEIGH_ROW)
    own_total = total.slice(0, ROWS).load(WEIGH_ROW)
    highest = gl.maximum(own_maximum, gl.reduce(lse, 1, larger))
    # Empty ranges have LSE = -inf and weigh nothing: avoid -inf - -inf.
    reference = gl.where(highest == float("-inf"), 0.0, highest)
    weight = gl.exp2(lse - reference[:, None])
    own_weight = gl.exp2(own_maximum - reference)
    sums = own_total * own_weight + gl.reduce(weight, 1, plus)
    normal = 1.0 / gl.where(sums > 0.0, sums, 1.0)
    factors.permute((1, 0)).store(weight * scale * normal[:, None])
    result = result * gl.convert_layout(own_weight * normal, ROW)[:, None]
    gl.thread_barrier()

    weights = factors._reinterpret(gl.float32, [PARTS, ROWS], PLAIN)
    if merged > 4:
        result = _add_partials(
            result, weights, at_row, in_group, merged, partial_out_ptr, offs_d, 8, NUM_HEADS,
            HEAD_DIM, ROW,
        )  # fmt: skip
    elif merged > 2:
        result = _add_partials(
            result, weights, at_row, in_group, merged, partial_out_ptr, offs_d, 4, NUM_HEADS,
            HEAD_DIM, ROW,
        )  # fmt: skip
    else:
        result = _add_partials(
            result, weights, at_row, in_group, merged, partial_out_ptr, offs_d, 2, NUM_HEADS,
            HEAD_DIM, ROW,
        )  # fmt: skip

    out_at = query * (stride_out_batch // 8) + row_head * (stride_out_head // 8)
    out_at = out_at.to(gl.uint32).to(gl.int64) * 8
    gl.store(out_ptr + out_at[:, None] + offs_d[None, :], result.to(DTYPE), mask=in_group[:, None])


@jit
def write_results(
    acc_shared, row_maximum, row_total, entry, queries, kv_head, out_ptr, partial_out_ptr,
    partial_lse_ptr, partial_scale_ptr, entry_query_ptr, entry_slot_ptr, stride_out_batch,
    stride_out_head, offs_m, offs_d, NUM_HEADS: gl.constexpr, GQA_GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr, COPY: gl.constexpr,
):  # fmt: skip
    """Write the outputs or partial results of an item's queries."""
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty
    PARTIAL: gl.constexpr = partial_out_ptr.dtype.element_ty
    query_of_row = offs_m // GQA_GROUP
    in_tile = query_of_row < queries
    query = gl.load(entry_query_ptr + entry + query_of_row, mask=in_tile, other=0)
    slot = gl.load(entry_slot_ptr + entry + query_of_row, mask=in_tile, other=0)
    row_head = kv_head * GQA_GROUP + offs_m % GQA_GROUP
    result = acc_shared.load(COPY)

    # An empty range contributes nothing: O = 0, LSE = -inf.
    safe_total = gl.where(row_total > 0.0, row_total, 1.0)
    normal = 1.0 / safe_total
    direct = in_tile & (slot < 0)
    partial = in_tile & (slot >= 0)
    if gl.reduce(direct.to(gl.int32), 0, larger) > 0:
        out_at = query * (stride_out_batch // 8) + row_head * (stride_out_head // 8)
        out_at = out_at.to(gl.uint32).to(gl.int64) * 8
        gl.store(
            out_ptr + out_at[:, None] + offs_d[None, :],
            (result * normal[:, None]).to(DTYPE),
            mask=direct[:, None],
        )
    if gl.reduce(partial.to(gl.int32), 0, larger) > 0:
        # Partial results keep 11 bits of mantissa relative to their row's largest element,
        # whatever the range of the cache's dtype.
        largest = gl.maximum(gl.reduce(gl.abs(result), 1, larger), 1.0e-30)
        slot_at = slot * NUM_HEADS + row_head
        slot_row = (slot_at * (HEAD_DIM // 8)).to(gl.uint32).to(gl.int64) * 8
        gl.store(
            partial_out_ptr + slot_row[:, None] + offs_d[None, :],
            (result * (1.0 / largest)[:, None]).to(PARTIAL),
            mask=partial[:, None],
        )
        row_lse = gl.where(row_total > 0.0, row_maximum + gl.log2(safe_total), float("-inf"))
        gl.store(partial_lse_ptr + slot_at, row_lse, mask=partial)
        gl.store(partial_scale_ptr + slot_at, largest * normal, mask=partial)
