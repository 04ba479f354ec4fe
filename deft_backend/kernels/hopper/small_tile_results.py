"""Small tiles: the online softmax, transposed, and the results (Gluon).

Tokens are on the tensor cores' rows. An item writes its own result, or merges it with others first:

O = sum_i O_i 2^LSE_i / (sum_i 2^LSE_i + 2^sink)          (DeFT, equation 1, in base 2)

A head's sink, if it has one, belongs to the output, never to a partial result.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from deft_backend.kernels.hopper.eight_bits import keys_of, values_of
from deft_backend.kernels.hopper.parts import (
    capped,
    larger,
    places_of,
    plus,
    sees,
    sink_weight,
    weights_of,
)
from deft_backend.kernels.hopper.versions import gl, jit, mma_v2, reinterpret
from deft_backend.planner import encoding


class Online(NamedTuple):
    """The softmax of an item's tokens so far, for M query vectors."""

    maximum: Any  # [M]: each query vector's largest score, in base 2
    total: Any
    """[8, M]: sums of weights. Eight threads share a row, and each has a sum; [4, M] in the ordered
    tile, as four threads of the large tile have them."""
    acc: Any  # [D, M]: sums of values, weighted by ``2^(score - maximum)``


@jit
def no_tokens(HEADS, TILE, LAYOUT):
    """The softmax before an item's first token."""
    BLOCK_M: gl.constexpr = TILE.height
    BLOCK_N: gl.constexpr = TILE.block_tokens
    HEAD_DIM: gl.constexpr = HEADS.dim
    no_weights = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, LAYOUT.product)
    return Online(
        gl.full([BLOCK_M], float("-inf"), gl.float32, LAYOUT.column),
        _thread_sums(no_weights, BLOCK_N, BLOCK_M, TILE),
        gl.zeros([HEAD_DIM, BLOCK_M], gl.float32, LAYOUT.product),
    )


@jit
def _thread_sums(weights, BLOCK_N, BLOCK_M, TILE):
    """`Online.total` of one block."""
    if TILE.ordered:  # a token is a column in `large_tile_results._by_thread`
        sums = gl.reshape(weights, [4, BLOCK_N // 32, 4, 2, BLOCK_M])
        sums = gl.reduce(gl.reduce(gl.reduce(sums, 1, plus), 0, plus), 1, plus)
    else:  # a product's rows are those of eight threads in turn
        sums = gl.reduce(gl.reshape(weights, [BLOCK_N // 8, 8, BLOCK_M]), 0, plus)
    return sums


class Block(NamedTuple):
    """A block of an item's tokens, in shared memory."""

    q: Any  # [M, D]
    k: Any
    v: Any  # [tokens, D]
    left: Any  # tokens of the item from the block's first one on


@jit
def add_block(online, block, tail, tensors, scaling, strides, HEADS, CACHE, TILE, MODE, LAYOUT):
    """The softmax with one more block of tokens."""
    left = block.left
    DTYPE: gl.constexpr = tensors.q.dtype.element_ty
    EXPONENT_BITS: gl.constexpr = CACHE.exponent_bits
    BLOCK_M: gl.constexpr = TILE.height
    BLOCK_N: gl.constexpr = TILE.block_tokens
    factor = scaling.scale
    if MODE.soft_cap:
        factor = 1.0
    token = gl.arange(0, BLOCK_N, layout=LAYOUT.token)
    no_scores = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, LAYOUT.product)
    keys = keys_of(block.k, DTYPE, EXPONENT_BITS, LAYOUT)
    scores = mma_v2(keys, block.q.permute((1, 0)).load(LAYOUT.queries), no_scores)
    scores = capped(scores, scaling, MODE.soft_cap)
    scores = gl.where((token < left)[:, None], scores, float("-inf"))
    if not HEADS.single:
        if left - BLOCK_N < tail.hidden:  # some of these are query tokens
            row = gl.arange(0, BLOCK_M, layout=LAYOUT.column)
            query_token = tail.first + row % HEADS.vectors // HEADS.group
            first = tail.hidden - left
            seen = sees(first, token, query_token, tail, tensors, strides, 0, HEADS)
            scores = gl.where(seen, scores, float("-inf"))
    maximum = gl.maximum(online.maximum, gl.reduce(scores, 0, larger) * factor)
    # An empty range keeps its maximum at -inf: avoid -inf - -inf.
    reference = gl.where(maximum == float("-inf"), 0.0, maximum)
    weights = weights_of(scores, factor, reference[None, :])
    rescale = gl.exp2(online.maximum - reference)
    added = _thread_sums(weights, BLOCK_N, BLOCK_M, TILE)
    by_thread = gl.convert_layout(rescale, gl.SliceLayout(0, online.total.type.layout))
    total = gl.fma(online.total, by_thread[None, :], added)
    values = values_of(block.v, DTYPE, EXPONENT_BITS, LAYOUT)
    weights = gl.convert_layout(weights.to(DTYPE), LAYOUT.right)
    acc = mma_v2(values, weights, online.acc * rescale[None, :])
    return Online(maximum, total, acc)


@jit
def _in_elements(units):
    """Offsets in elements, from offsets in units of 16 bytes: 32 bits of these reach 64 GiB."""
    return units.to(gl.uint32).to(gl.int64) * 8


@jit
def _result_of(vector, kv_head, HEADS):
    """The place of each vector of one query and KV head among a partial result's query vectors."""
    result = kv_head * HEADS.group + vector
    if not HEADS.single:
        token = vector // HEADS.group
        result += token * (HEADS.num_kv * HEADS.group) - token * HEADS.group
    return result


@jit
def _load_parts(first_slot, kv_head, first, stop, tensors, MOST, ROWS, HEADS):
    """Load partial results `first` to `stop`, at most MOST of them, of one query and KV head: the
    fields of `Partials`, [ROWS, MOST, D], [ROWS, MOST] and [ROWS, MOST].
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
def _parts_of(x, MOST):
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
    result, first_slot, kv_head, merged, buffers, tensors, MOST, LIMIT, ROWS, HEADS, MODE
):
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
def merge_results(own, kv_head, place, buffers, tensors, strides, HEADS, TILE, MODE, LAYOUT):
    """Merge the result of an item of one query with earlier partial results; write its output.

    `place` [M, D] holds the item's result, of which only the query's rows count. The partial
    results lie in neighbouring slots, the first of which the entry's slot encodes.
    """
    ROWS: gl.constexpr = LAYOUT.query_rows
    FEW: gl.constexpr = 2 if ROWS <= 8 else 1
    MANY: gl.constexpr = 8 if ROWS <= 4 else 4 if ROWS == 8 else 1
    LIMIT: gl.constexpr = TILE.max_merged
    HEAD_DIM: gl.constexpr = HEADS.dim
    TILES: gl.constexpr = TILE.height // ROWS
    RESULT: gl.constexpr = LAYOUT.result
    MERGES: gl.constexpr = encoding.MERGES
    tiles = reinterpret(place, gl.float32, [TILES, ROWS, HEAD_DIM], RESULT)
    result = tiles.index(0).load(LAYOUT.copy)
    first_slot, merged = MERGES - own.slot, own.merged
    if merged > FEW:
        result = _merge_loaded(
            result, first_slot, kv_head, merged, buffers, tensors, MANY, LIMIT, ROWS, HEADS, MODE
        )
    else:
        result = _merge_loaded(
            result, first_slot, kv_head, merged, buffers, tensors, FEW, FEW, ROWS, HEADS, MODE
        )

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
def _entries_of(own, kv_head, tensors, plan, HEADS, TILE, LAYOUT):
    """[M]: the slot of each query vector's entry, and its place."""
    offs_m = gl.arange(0, TILE.height, layout=LAYOUT.copy_row)
    query_of_row = offs_m // HEADS.vectors
    there = query_of_row < own.queries
    query = gl.load(plan.entry_query + own.entry + query_of_row, mask=there, other=0)
    slot = gl.load(plan.entry_slot + own.entry + query_of_row, mask=there, other=0)
    return slot, places_of(query, offs_m % HEADS.vectors, there, kv_head, tensors, HEADS)


@jit
def write_results(own, kv_head, place, buffers, tensors, plan, strides, HEADS, TILE, MODE, LAYOUT):
    """Write the outputs or partial results of an item's queries.

    `place` [M, D] holds sums of values, `buffers` each row's maximum and sum of weights. An empty
    range contributes nothing: O = 0, LSE = -inf.
    """
    maximum = buffers.maximum.load(LAYOUT.copy_row)
    total = buffers.total.load(LAYOUT.copy_row)
    offs_d = gl.arange(0, HEADS.dim, layout=LAYOUT.copy_dim)
    slot, places = _entries_of(own, kv_head, tensors, plan, HEADS, TILE, LAYOUT)
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


@jit
def write_ordered(own, kv_head, place, buffers, tensors, plan, HEADS, TILE, LAYOUT):
    """Write the partial results of an ordered tile's queries as the large tile writes them.

    `place` and `buffers` as in :func:`write_results`.
    """
    DTYPE: gl.constexpr = tensors.out.dtype.element_ty
    PARTIAL: gl.constexpr = tensors.partial.out.dtype.element_ty
    maximum = buffers.maximum.load(LAYOUT.copy_row)
    sums = buffers.total.load(LAYOUT.copy_row)
    acc = place.load(LAYOUT.copy)
    empty = sums == 0.0
    lse = gl.where(empty, float("-inf"), maximum + gl.log2(sums))
    inverse = gl.where(empty, 0.0, 1.0 / sums)
    largest = gl.full([TILE.height], 2.0, gl.float32, LAYOUT.copy_row)
    if DTYPE != PARTIAL:
        largest = gl.maximum(gl.reduce(gl.abs(acc), 1, larger) * inverse, 1.0e-30)

    offs_d = gl.arange(0, HEADS.dim, layout=LAYOUT.copy_dim)
    slot, places = _entries_of(own, kv_head, tensors, plan, HEADS, TILE, LAYOUT)
    slot_at = slot * (HEADS.num_kv * HEADS.vectors) + places.result
    at = _in_elements(slot_at * (HEADS.dim // 8))
    gl.store(
        tensors.partial.out + at[:, None] + offs_d[None, :],
        (acc * (inverse / largest)[:, None]).to(PARTIAL),
        mask=places.there[:, None],
    )
    gl.store(tensors.partial.lse + slot_at, lse, mask=places.there)
    gl.store(tensors.partial.scale + slot_at, largest, mask=places.there)
