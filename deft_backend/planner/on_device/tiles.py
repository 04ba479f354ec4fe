"""What the device planner's kernels share: how ranges divide into tiles and chunks, and sums."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton import jit
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deft_backend.policies import policy
from deft_backend.policies.invariant import End

CHUNK = tl.constexpr(policy.CHUNK)
PER_OCTAVE = tl.constexpr(policy.PER_OCTAVE)
PARTS = tl.constexpr(policy.PARTS)


@jit
def overlap(OVERLAPPED):
    """Let the next kernel start, and wait for the one ahead, if launches may overlap."""
    if OVERLAPPED:
        gdc_launch_dependents()
        gdc_wait()


@jit
def tiles_of(queries, small_tile, large_tile):
    """Whether each range's queries need large tiles, and how many tiles they fill.

    `small_tile` and `large_tile` are the queries that a tile holds. A small tile holds 0 queries if
    the GQA group is larger than the tile; then every range needs large tiles.
    """
    is_large = queries > small_tile
    held = tl.where(is_large, large_tile, tl.maximum(small_tile, 1))
    return is_large, (queries + held - 1) // held


@jit
def total(values):
    return tl.reduce(values, 0, tl.standard._sum_combine)


@jit
def sum_of_rows(values):
    return tl.reduce(values, 1, tl.standard._sum_combine)


class Estimate(NamedTuple):
    """``C_est`` of each tile shape in nanoseconds: linear between profiled lengths."""

    knots: Any  # the profiled lengths in tokens, besides the first and the last
    small: Any
    """For the small tile: the time of 0 tokens, then the rise for each token, then the rise's
    growth at each knot."""
    large: Any


@jit
def estimated_ns(tokens, is_large, estimate):
    length = tokens.to(tl.float32)
    small = estimate.small[0] + length * estimate.small[1]
    large = estimate.large[0] + length * estimate.large[1]
    for knot in tl.static_range(len(estimate.knots)):
        over = tl.maximum(length - estimate.knots[knot], 0.0)
        small += over * estimate.small[2 + knot]
        large += over * estimate.large[2 + knot]
    return tl.maximum(tl.where(is_large, large, small), 1.0)


@jit
def sizes_of(tokens, is_large, estimate, CHUNKS):
    """What chunks divide: tokens, or nanoseconds for the rule ``scheduled``."""
    sizes = tokens
    if CHUNKS == "scheduled":
        sizes = estimated_ns(tokens, is_large, estimate).to(tl.int32)
    return sizes


@jit
def parts_of(sizes, tokens, chunk, block, CHUNKS):
    """Chunks of each range, at least one; ``scheduled``: at most one for each KV block.

    No sum here may pass 2**31, so nothing is added to a size before the division.
    """
    parts = tl.maximum((sizes - 1) // chunk + 1, 1)
    if CHUNKS == "scheduled":
        parts = tl.minimum(parts, tl.maximum((tokens - 1) // block + 1, 1))
    return parts


@jit
def _whole_at(token, short_tokens):
    EACH: tl.constexpr = CHUNK.value
    CHUNKS: tl.constexpr = PER_OCTAVE.value
    unit = tl.maximum(token - short_tokens, 0) // (2 * EACH)
    # The exponent of a float32, which holds any number of octaves of a context exactly.
    of_octave = tl.maximum(unit // CHUNKS, 1).to(tl.float32)
    octave = (of_octave.to(tl.int32, bitcast=True) >> 23) - 127
    longer = short_tokens // EACH + octave * CHUNKS + (unit >> octave)
    return tl.where(token < short_tokens, token // EACH, longer)


@jit
def _begin_of(chunk, short_tokens):
    EACH: tl.constexpr = CHUNK.value
    CHUNKS: tl.constexpr = PER_OCTAVE.value
    longer = chunk - short_tokens // EACH
    octave = tl.maximum(longer // CHUNKS - 1, 0)
    begin = short_tokens + ((longer - octave * CHUNKS) << octave) * (2 * EACH)
    return tl.where(longer < 0, chunk * EACH, begin)


@jit
def end_of(length, short_tokens):
    ALL: tl.constexpr = PARTS.value
    last = tl.maximum(length - 1, 0)
    whole = _whole_at(last, short_tokens)
    local = _begin_of(whole + 1, short_tokens) - _begin_of(whole, short_tokens)
    whole = _whole_at(tl.maximum(last - local // 4, 0), short_tokens)
    begin = _begin_of(whole, short_tokens)
    part = (_begin_of(whole + 1, short_tokens) - begin) // ALL
    shared = tl.minimum((last - begin) // part, ALL)
    return End(whole, begin, part, shared, tl.where(shared == ALL, ALL - ALL // 4, shared))


@jit
def chunk_at(token, length, short_tokens):
    """The chunk of `invariant` that holds each token of requests of these lengths."""
    ALL: tl.constexpr = PARTS.value
    end = end_of(length, short_tokens)
    at = (token - end.begin) // end.part
    behind = ((end.shared > 0) & (at >= tl.minimum(end.shared, ALL // 2))).to(tl.int32)
    behind += ((end.shared > ALL // 2) & (at >= end.second)).to(tl.int32)
    behind += ((end.shared == ALL) & (at >= ALL)).to(tl.int32)
    return tl.where(token < end.begin, _whole_at(token, short_tokens), end.whole + behind)


@jit
def chunk_begin(chunk, length, short_tokens):
    """The first token of each chunk of `invariant`; of the one behind the last, or later ones, the
    request's length or more.
    """
    ALL: tl.constexpr = PARTS.value
    end = end_of(length, short_tokens)
    behind, later = chunk - end.whole, end.shared * 0 + 2 * ALL
    parts = tl.where(end.shared > 0, tl.minimum(end.shared, ALL // 2), later)
    parts = tl.where(behind == 2, tl.where(end.shared > ALL // 2, end.second, later), parts)
    parts = tl.where(behind > 2, tl.where((end.shared == ALL) & (behind == 3), ALL, later), parts)
    begin = end.begin + parts * end.part
    return tl.where(behind <= 0, _begin_of(chunk, short_tokens), begin)


@jit
def shared_chunks(tokens, length, other_length, short_tokens):
    """Tokens of the chunks that two requests share, which share this many tokens."""
    ALL: tl.constexpr = PARTS.value
    end, other = end_of(length, short_tokens), end_of(other_length, short_tokens)
    half = tl.where(tl.minimum(end.shared, other.shared) >= ALL // 2, ALL // 2, 0)
    alike = tl.where(end.second == other.second, end.second, half)
    alike = tl.where(end.shared == other.shared, end.shared, alike) * end.part
    other_begin = tl.minimum(end.begin, other.begin)
    alike = tl.where(end.begin == other.begin, end.begin + alike, other_begin)
    tokens = tl.minimum(tokens, alike)
    return chunk_begin(chunk_at(tokens, length, short_tokens), length, short_tokens)
