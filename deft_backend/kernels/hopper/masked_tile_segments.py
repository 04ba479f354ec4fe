"""An item's segments, held by the lanes of each warp, and where an item's tokens lie (Gluon).

An item's segments, one behind the other, are its stream of tokens. Lane ``i`` of every warp holds
segment ``i``. A thread that needs a token's segment asks the lanes: five shuffles find the last
segment that starts at the token or before it, and one more brings each of its numbers.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from deft_backend.kernels.hopper.parts import plus
from deft_backend.kernels.hopper.versions import constexpr_function, gl, jit
from deft_backend.planner import encoding


class Item(NamedTuple):
    """What the plan says about an item of several KV ranges."""

    entry: Any  # its first entry
    queries: Any
    first_segment: Any
    segments: Any


class Listed(NamedTuple):
    """What the plan says about an item's segments: [32] numbers."""

    present: Any
    request: Any
    start: Any
    stop: Any  # OPEN_END for an open range
    span: Any


class Followed(NamedTuple):
    """What the host's tensors say about the same segments: [32] numbers."""

    length: Any  # tokens of the segment's request
    row: Any  # its row of the page table
    query_tokens: Any


class Segments(NamedTuple):
    """An item's segments as `locate` needs them: [32] numbers, and a scalar."""

    offset: Any
    """Place in the stream of each segment's first token; `tokens` for lanes without a segment."""
    shift: Any  # what to add to a place in the stream for the position in the segment's request
    row: Any
    span: Any
    before: Any  # position of the request's first query token
    tokens: Any  # tokens of all segments


class Tokens(NamedTuple):
    """Where tokens of a stream lie, and who attends to them: [rows, 32] numbers."""

    entry: Any  # pointers to the page table: the tokens' page ids
    position: Any  # in the token's request
    span: Any  # 0 behind the stream: no query attends to these tokens
    hidden: Any  # number among its request's query tokens; negative for the tokens before these


@constexpr_function
def by_lane(warps):
    """The layout of [rows, 32] numbers: a column for each lane, rows over the warps in turn."""
    return gl.BlockedLayout([1, 1], [1, 32], [warps, 1], [1, 0])


@jit
def from_lane(values, lane):
    """[..., 32]: the value that another lane of the warp holds."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 31, 0xffffffff;",
        "=r,r,r",
        [values, lane],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def _lanes():
    BY_LANE: gl.constexpr = by_lane(gl.num_warps())
    return gl.arange(0, 32, layout=gl.SliceLayout(0, BY_LANE))


@jit
def read_item(work, work_end, plan, HEADS):
    """First link of the chain of loads: the item of `work`; empty from `work_end` on."""
    number = work // HEADS.num_kv
    there = work < work_end
    entry = gl.load(plan.item_query_ptr + number, mask=there, other=0)
    entry_end = gl.load(plan.item_query_ptr + number + 1, mask=there, other=0)
    segment = gl.load(plan.item_segment_ptr + number, mask=there, other=0)
    segment_end = gl.load(plan.item_segment_ptr + number + 1, mask=there, other=0)
    return Item(entry, entry_end - entry, segment, segment_end - segment)


@jit
def list_segments(item, plan):
    """Second link: what the plan says about the item's segments."""
    lane = _lanes()
    present = lane < item.segments
    segment = item.first_segment + lane
    return Listed(
        present,
        gl.load(plan.segment_request + segment, mask=present, other=0),
        gl.load(plan.segment_start + segment, mask=present, other=0),
        gl.load(plan.segment_end + segment, mask=present, other=0),
        gl.load(plan.segment_span + segment, mask=present, other=0),
    )


@jit
def follow_segments(item, listed, tensors, HEADS):
    """Third link: what the host's tensors say about the item's segments."""
    present, request = listed.present, listed.request
    wanted = present
    if HEADS.single:
        wanted = present & (listed.stop < 0)
    length = gl.load(tensors.seq_lens + request, mask=wanted, other=0).to(gl.int32)
    segment = item.first_segment + _lanes()
    row = gl.load(tensors.table_rows + segment, mask=present, other=0).to(gl.int32)
    query_tokens = request * 0 + HEADS.query_tokens
    if HEADS.ragged:
        query_tokens = gl.load(tensors.query_start + request + 1, mask=present, other=0)
        query_tokens -= gl.load(tensors.query_start + request, mask=present, other=0)
    return Followed(length, row, query_tokens)


@jit
def join_segments(listed, followed):
    """The item's stream of tokens."""
    lane = _lanes()
    stop = gl.where(listed.stop < 0, followed.length, listed.stop)
    tokens = gl.where(listed.present, gl.maximum(stop - listed.start, 0), 0)
    behind = tokens
    for i in gl.static_range(5):
        added = from_lane(behind, gl.maximum(lane - (1 << i), 0))
        behind += gl.where(lane >= 1 << i, added, 0)
    offset = behind - tokens
    return Segments(
        offset,
        listed.start - offset,
        followed.row,
        listed.span,
        followed.length - followed.query_tokens,
        gl.reduce(tokens, 0, plus),
    )


@jit
def locate(place, segments, tensors, strides, HEADS, CACHE):
    """Where the tokens at places [rows, 32] of the stream lie.

    Tokens behind the stream's end lie where its last token does. Masked rows of a KV block must
    hold tokens of the item: any other number, even times 0, could spoil the result.
    """
    every = place * 0
    at = gl.maximum(gl.minimum(place, segments.tokens - 1), 0)
    offset = gl.expand_dims(segments.offset, 0) + every
    number = every
    for i in gl.static_range(5):
        further = number + (16 >> i)
        number = gl.where(from_lane(offset, further) <= at, further, number)
    position = at + from_lane(gl.expand_dims(segments.shift, 0) + every, number)
    row = from_lane(gl.expand_dims(segments.row, 0) + every, number)
    span = from_lane(gl.expand_dims(segments.span, 0) + every, number)
    span = gl.where(place < segments.tokens, span, 0)
    hidden = position
    if not HEADS.single:
        hidden -= from_lane(gl.expand_dims(segments.before, 0) + every, number)
    entry = tensors.page_table + row.to(gl.int64) * strides.table + position // CACHE.page_size
    return Tokens(entry, position, span, hidden)


@jit
def in_span(query, span):
    """[M, N]: whether queries [M] of the item attend to tokens of spans [N]."""
    MASK: gl.constexpr = encoding.SPAN_MASK
    SHIFT: gl.constexpr = encoding.SPAN_SHIFT
    begin = span & MASK
    tall = (span >> SHIFT) - begin
    ahead = gl.expand_dims(query, 1) - gl.expand_dims(begin, 0)
    return ahead.to(gl.uint32) < gl.expand_dims(tall, 0).to(gl.uint32)
