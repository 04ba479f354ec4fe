"""The tokens of a masked tile that only some of its queries attend to, found by position."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton import jit


class Rest(NamedTuple):
    """The tokens that are left to the loop with masks, by segment: [S] numbers.

    Positions count through these tokens, from 0.
    """

    first_segment: Any
    offset: Any  # position of each segment's first token
    code: Any
    """The segment's number above SHIFT_BITS bits, which hold its shift: what to add to a position
    for the token's position in its request. Codes grow with the segment's number."""
    tokens: Any  # how many they are in all segments: a scalar


SHIFT_BITS = tl.constexpr(26)  # bits of a code that hold a segment's shift


@jit
def rest_of(item, done, tensors, plan, TILE: tl.constexpr):
    """The tokens of an item behind the first `done` tokens of its first segment."""
    SHIFT: tl.constexpr = SHIFT_BITS.value
    offs_s = tl.arange(0, TILE.block_segments)
    present = offs_s < item.segments
    segment = item.first_segment + offs_s
    request = tl.load(plan.segment_request + segment, mask=present, other=0)
    start = tl.load(plan.segment_start + segment, mask=present, other=0)
    stop = tl.load(plan.segment_end + segment, mask=present, other=0)
    length = tl.load(tensors.seq_lens + request, mask=present & (stop < 0), other=0)
    stop = tl.where(stop < 0, length.to(tl.int32), stop)
    start += tl.where(offs_s == 0, done, 0)
    tokens = tl.maximum(stop - start, 0)
    offset = tl.associative_scan(tokens, 0, tl.standard._sum_combine)
    remaining = tl.reduce(tokens, 0, tl.standard._sum_combine)
    offset -= tokens
    code = (offs_s << SHIFT) + (start - offset + (1 << (SHIFT - 1)))
    offset = tl.where(present, offset, remaining)
    return Rest(item.first_segment, offset, code, remaining)


@jit
def locate(position, rest, tensors, plan, strides, CACHE: tl.constexpr):
    """Page, position in the request, and span of [N] positions among an item's remaining tokens.

    The segment of a position is the last one that has started: the maximum of their codes.
    """
    SHIFT: tl.constexpr = SHIFT_BITS.value
    inside = position < rest.tokens
    started = position[:, None] >= rest.offset[None, :]
    code = tl.reduce(tl.where(started, rest.code[None, :], 0), 1, tl.standard._elementwise_max)
    token = position + (code & ((1 << SHIFT) - 1)) - (1 << (SHIFT - 1))
    segment = rest.first_segment + (code >> SHIFT)
    span = tl.load(plan.segment_span + segment, mask=inside, other=0)
    listed = segment
    if not CACHE.table_by_segment:
        listed = tl.load(plan.segment_request + segment, mask=inside, other=0)
    table_row = tl.load(tensors.table_rows + listed, mask=inside, other=0)
    entry = tensors.page_table + table_row.to(tl.int64) * strides.table + token // CACHE.page_size
    page = tl.load(entry, mask=inside, other=0)
    return page, token, span
