"""What the device planner's kernels share: how ranges divide into tiles and chunks, and sums."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton.language as tl
from triton import jit
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from deft_backend.policies import policy

PER_OCTAVE = tl.constexpr(policy.PER_OCTAVE)
SHARES = tl.constexpr(policy.SHARES)


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
def _whole_at(token, chunk_tokens):
    CHUNKS: tl.constexpr = PER_OCTAVE.value
    unit = token // chunk_tokens
    # The exponent of a float32, which holds any number of octaves of a context exactly.
    of_octave = tl.maximum(unit // CHUNKS, 1).to(tl.float32)
    octave = (of_octave.to(tl.int32, bitcast=True) >> 23) - 127
    return octave * CHUNKS + (unit >> octave)


@jit
def _begin_of(chunk, chunk_tokens):
    CHUNKS: tl.constexpr = PER_OCTAVE.value
    octave = tl.maximum(chunk // CHUNKS - 1, 0)
    return ((chunk - octave * CHUNKS) << octave) * chunk_tokens


@jit
def short_chunks(length, chunk_tokens):
    """The first short chunk behind half a chunk, its first token, and its tokens (`Invariant`)."""
    PARTS: tl.constexpr = SHARES.value
    last = tl.maximum(length - 1 - chunk_tokens // PARTS, 0)
    whole = _whole_at(last, chunk_tokens)
    begin = _begin_of(whole, chunk_tokens)
    tokens = _begin_of(whole + 1, chunk_tokens) - begin
    halves = (last - begin) // (tokens // 2)  # 0 or 1
    return whole + halves, begin + halves * (tokens // 2), tokens // PARTS


@jit
def chunk_at(token, length, chunk_tokens):
    """The chunk of `invariant` that holds each token of requests of these lengths."""
    first, begin, tokens = short_chunks(length, chunk_tokens)
    short = first + (token - begin) // tokens
    return tl.where(token < begin, _whole_at(token, chunk_tokens), short)


@jit
def chunk_begin(chunk, length, chunk_tokens):
    """The first token of each chunk of `invariant`."""
    first, begin, tokens = short_chunks(length, chunk_tokens)
    short = begin + (chunk - first) * tokens
    return tl.where(chunk < first, _begin_of(chunk, chunk_tokens), short)


@jit
def shared_chunks(tokens, length, other_length, chunk_tokens):
    """Tokens of the chunks that two requests share, which share this many tokens."""
    _, begin, _ = short_chunks(length, chunk_tokens)
    _, other_begin, _ = short_chunks(other_length, chunk_tokens)
    # Requests whose short chunks begin at other positions share whole chunks only.
    whole = _begin_of(_whole_at(tl.minimum(begin, other_begin), chunk_tokens), chunk_tokens)
    tokens = tl.where(begin == other_begin, tokens, tl.minimum(tokens, whole))
    return chunk_begin(chunk_at(tokens, length, chunk_tokens), length, chunk_tokens)
