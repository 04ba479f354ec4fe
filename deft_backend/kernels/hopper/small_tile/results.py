"""Results of small tiles: an item writes its own, or merges it with others first (Gluon).

O = sum_i O_i 2^LSE_i / (sum_i 2^LSE_i + 2^sink)          (DeFT, equation 1, in base 2)

A head's sink, if it has one, belongs to the output, never to a partial result.
"""

from __future__ import annotations

from deft_backend.kernels.hopper.parts import larger, plus, sink_weight
from deft_backend.kernels.hopper.query_tokens import places_of
from deft_backend.kernels.hopper.versions import gl, jit, reinterpret
from deft_backend.planner import encoding_constants


@jit
def _in_elements(units):
    """Offsets in elements, from offsets in units of 16 bytes: 32 bits of these reach 64 GiB."""
    return units.to(gl.uint32).to(gl.int64) * 8


@jit
def _result_of(vector, kv_head, HEADS: gl.constexpr):
    """The place of each vector of one query and KV head among a partial result's query vectors."""
    result = kv_head * HEADS.group + vector
    if not HEADS.single:
        token = vector // HEADS.group
        result += token * (HEADS.num_kv * HEADS.group) - token * HEADS.group
    return result


@jit
def _load_parts(
    first_slot, kv_head, first, stop, tensors, MOST: gl.constexpr, ROWS: gl.constexpr,
    HEADS: gl.constexpr,
):  # fmt: skip
    """Load partial results `first` to `stop`, at most MOST of them, of one query and KV head.

    Returns the fields of `Partials`: [ROWS, MOST, D], [ROWS, MOST] and [ROWS, MOST]. The workspace
    holds far fewer than 2^31 units of 16 bytes.
    """
    # 16 bytes a thread; all threads that share a row hold its LSE and scale.
    PARTS: gl.constexpr = gl.BlockedLayout(
        [1, MOST, 8], [256 // HEADS.dim, 1, HEADS.dim // 8], [1, 1, 1], [2, 1, 0]
    )
    ROW_PART: gl.constexpr = gl.SliceLayout(2, PARTS)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, ROW_PART))
    part = first + gl.arange(0, MOST, layout=gl.SliceLayout(0, ROW_PART))
    offs_d = gl.arange(0, HEADS.dim, layout=gl.SliceLayout(0, gl.SliceLayout(0, PARTS)))
    partials = tensors.partial
    there = (row < HEADS.vectors)[:, None] & (part < stop)[None, :]
    result = _result_of(row, kv_head, HEADS)
    at = result[:, None] + ((first_slot + part) * (HEADS.num_kv * HEADS.vectors))[None, :]
    lse = gl.load(partials.lse + at, mask=there, other=float("-inf"))
    scale = gl.load(partials.scale + at, mask=there, other=0.0)
    at = _in_elements(at * (HEADS.dim // 8))
    at = gl.expand_dims(at, 2) + gl.expand_dims(gl.expand_dims(offs_d, 0), 0)
    out = gl.load(partials.out + at, mask=gl.expand_dims(there, 2), other=0.0)
    return out, lse, scale


@jit
def _parts_of(x, MOST: gl.constexpr):
    """Split [rows, MOST, D] along its second axis, in a fixed order; MOST is 1, 2, 4 or 8."""
    x = gl.permute(x, (0, 2, 1))
    if MOST == 1:
        return (gl.reshape(x, [x.shape[0], x.shape[1]]),)
    elif MOST == 2:
        return gl.split(x)
    elif MOST == 4:
        a, b = gl.split(gl.reshape(x, [x.shape[0], x.shape[1], 2, 2]))
        a, c = gl.split(a)
        b, d = gl.split(b)
        return (a, b, c, d)
    else:
        gl.static_assert(MOST == 8)
        a, b = gl.split(gl.reshape(x, [x.shape[0], x.shape[1], 2, 2, 2]))
        a, c = gl.split(a)
        b, d = gl.split(b)
        a, e = gl.split(a)
        b, f = gl.split(b)
        c, g = gl.split(c)
        d, h = gl.split(d)
        return (a, b, c, d, e, f, g, h)


@jit
def _merge_parts(result, maximum, total, out, lse, scale):
    """Add partial results to one that is not normalised yet (DeFT, equation 1).

    Empty ranges have LSE = -inf and weigh nothing: avoid -inf - -inf.
    """
    highest = gl.maximum(maximum, gl.reduce(lse, 1, larger))
    reference = gl.where(highest == float("-inf"), 0.0, highest)
    weight = gl.exp2(lse - reference[:, None])
    own_weight = gl.exp2(maximum - reference)
    total = total * own_weight + gl.reduce(weight, 1, plus)
    # One after the other: from Triton 3.8 on `reduce` adds in a tree, which holds more registers.
    MOST: gl.constexpr = out.shape[1]
    parts = _parts_of(out.to(gl.float32) * gl.expand_dims(weight * scale, 2), MOST)
    others = parts[0]
    for i in gl.static_range(1, MOST):
        others += parts[i]
    own_weight = gl.convert_layout(own_weight, gl.SliceLayout(1, result.type.layout))
    result = result * own_weight[:, None] + gl.convert_layout(others, result.type.layout)
    return result, highest, total


@jit
def _merge_loaded(
    result, first_slot, kv_head, merged, buffers, tensors, MOST: gl.constexpr,
    LIMIT: gl.constexpr, ROWS: gl.constexpr, HEADS: gl.constexpr, MODE: gl.constexpr,
):  # fmt: skip
    """Merge all partial results, LIMIT at most, MOST at a time, and normalise."""
    out, lse, scale = _load_parts(first_slot, kv_head, 0, merged, tensors, MOST, ROWS, HEADS)
    ROW: gl.constexpr = gl.SliceLayout(1, lse.type.layout)
    maximum = buffers.maximum.slice(0, ROWS).load(ROW)
    total = buffers.total.slice(0, ROWS).load(ROW)
    result, maximum, total = _merge_parts(result, maximum, total, out, lse, scale)
    if LIMIT > MOST:
        for first in range(MOST, merged, MOST):
            out, lse, scale = _load_parts(
                first_slot, kv_head, first, merged, tensors, MOST, ROWS, HEADS
            )
            result, maximum, total = _merge_parts(result, maximum, total, out, lse, scale)
    if MODE.sinks:
        row = gl.arange(0, ROWS, layout=ROW)
        head = kv_head * HEADS.group + row % HEADS.group
        total += sink_weight(tensors.sinks, head, row < HEADS.vectors, maximum)
    normal = 1.0 / gl.where(total > 0.0, total, 1.0)
    return result * gl.convert_layout(normal, gl.SliceLayout(1, result.type.layout))[:, None]


@jit
def merge_results(
    own, kv_head, place, buffers, tensors, strides, HEADS: gl.constexpr, TILE: gl.constexpr,
    MODE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Merge the result of an item of one query with earlier partial results; write its output.

    `place` [M, D] holds the item's result, of which only the query's rows count. The partial
    results lie in neighbouring slots, the first of which the entry's slot encodes.
    """
    ROWS: gl.constexpr = LAYOUT.query_rows
    FEW: gl.constexpr = 2 if ROWS <= 8 else 1
    MANY: gl.constexpr = 8 if ROWS <= 4 else 4 if ROWS == 8 else 1
    HEAD_DIM: gl.constexpr = HEADS.dim
    TILES: gl.constexpr = TILE.height // ROWS
    RESULT: gl.constexpr = LAYOUT.result
    MERGES: gl.constexpr = encoding_constants.MERGES.value
    tiles = reinterpret(place, gl.float32, [TILES, ROWS, HEAD_DIM], RESULT)
    result = tiles.index(0).load(LAYOUT.copy)
    first_slot = MERGES - own.slot
    if own.merged > FEW:
        result = _merge_loaded(
            result, first_slot, kv_head, own.merged, buffers, tensors, MANY, TILE.max_merged,
            ROWS, HEADS, MODE,
        )  # fmt: skip
    else:
        result = _merge_loaded(
            result, first_slot, kv_head, own.merged, buffers, tensors, FEW, FEW, ROWS, HEADS, MODE,
        )  # fmt: skip

    row = gl.arange(0, ROWS, layout=LAYOUT.copy_row)
    offs_d = gl.arange(0, HEAD_DIM, layout=LAYOUT.copy_dim)
    places = places_of(own.query, row, row < HEADS.vectors, kv_head, tensors, HEADS)
    at = places.row * (strides.out_batch // 8) + places.head * (strides.out_head // 8)
    gl.store(
        tensors.out + _in_elements(at)[:, None] + offs_d[None, :],
        result.to(tensors.out.dtype.element_ty),
        mask=places.there[:, None],
    )


@jit
def write_results(
    own, kv_head, place, buffers, tensors, plan, strides, HEADS: gl.constexpr,
    TILE: gl.constexpr, MODE: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Write the outputs or partial results of an item's queries.

    `place` [M, D] holds sums of values, `buffers` each row's maximum and sum of weights. An empty
    range contributes nothing: O = 0, LSE = -inf.
    """
    maximum = buffers.maximum.load(LAYOUT.copy_row)
    total = buffers.total.load(LAYOUT.copy_row)
    offs_m = gl.arange(0, TILE.height, layout=LAYOUT.copy_row)
    offs_d = gl.arange(0, HEADS.dim, layout=LAYOUT.copy_dim)
    query_of_row = offs_m // HEADS.vectors
    in_tile = query_of_row < own.queries
    query = gl.load(plan.entry_query + own.entry + query_of_row, mask=in_tile, other=0)
    slot = gl.load(plan.entry_slot + own.entry + query_of_row, mask=in_tile, other=0)
    places = places_of(query, offs_m % HEADS.vectors, in_tile, kv_head, tensors, HEADS)
    in_tile = places.there
    result = place.load(LAYOUT.copy)

    safe_total = gl.where(total > 0.0, total, 1.0)
    normal = 1.0 / safe_total
    direct = in_tile & (slot < 0)
    partial = in_tile & (slot >= 0)
    if gl.reduce(direct.to(gl.int32), 0, larger) > 0:
        whole = normal
        if MODE.sinks:
            sink = sink_weight(tensors.sinks, places.head, in_tile, maximum)
            whole = 1.0 / (safe_total + sink)
        at = places.row * (strides.out_batch // 8) + places.head * (strides.out_head // 8)
        gl.store(
            tensors.out + _in_elements(at)[:, None] + offs_d[None, :],
            (result * whole[:, None]).to(tensors.out.dtype.element_ty),
            mask=direct[:, None],
        )
    if gl.reduce(partial.to(gl.int32), 0, larger) > 0:
        # A partial result is stored relative to its largest element: this keeps 11 bits of
        # mantissa, whatever the range of the cache's dtype.
        largest = gl.maximum(gl.reduce(gl.abs(result), 1, larger), 1.0e-30)
        slot_at = slot * (HEADS.num_kv * HEADS.vectors) + places.result
        at = _in_elements(slot_at * (HEADS.dim // 8))
        gl.store(
            tensors.partial.out + at[:, None] + offs_d[None, :],
            (result * (1.0 / largest)[:, None]).to(tensors.partial.out.dtype.element_ty),
            mask=partial[:, None],
        )
        lse = gl.where(total > 0.0, maximum + gl.log2(safe_total), float("-inf"))
        gl.store(tensors.partial.lse + slot_at, lse, mask=partial)
        gl.store(tensors.partial.scale + slot_at, largest * normal, mask=partial)
