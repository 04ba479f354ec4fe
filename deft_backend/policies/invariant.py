"""`invariant`: a request's length cuts its KV, so its output depends on that request alone.

A request's length alone decides where its chunks begin. The first ones, of `short_tokens` tokens
together, have ``CHUNK`` tokens each, and the next ones twice as many: longer prefixes have longer
chunks. Behind ``2 * PER_OCTAVE`` of these, chunks are twice as long in each octave, like the gaps
between floating-point numbers. From there on, none is longer than 1/16 of the context before it.

A request ends in parts, ``1 / PARTS`` of a whole chunk: its last chunk has a part at most, and the
parts before it are one chunk, or a half of a whole chunk and one more. If the request has at most a
quarter of the whole chunk in which it ends, these tokens are its last chunk, and the whole chunk
before them is cut into a half and two quarters. So requests that branch inside a whole chunk read
little by themselves.

Requests side by side in depth-first order read a chunk together if they share all of it. That order
depends on the planner, but no bit does. A request's last chunk is its own.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np

from deft_backend.forest import PrefixForest, build_forest
from deft_backend.policies.edges import grouped_ranges, groups_of
from deft_backend.policies.grouping import Grouping, Int64Array, concatenated_ranges
from deft_backend.policies.policy import ABSOLUTE, CHUNK, PARTS, PER_OCTAVE, Policy, Rules
from deft_backend.policies.target import Limits, PolicyError, Target, check_limits
from deft_backend.settings.policy_names import INVARIANT
from deft_backend.shapes import ORDERED

LONGER_FROM = 42_000
"""Tokens up to which short chunks pay if a chunk costs a query as much as a part; fitted to
times on an H200."""

WORKSPACE_LIMIT = 2 << 30
"""Most bytes of partial results of the largest batch."""


class End(NamedTuple):
    """Requests behind their whole chunks, in parts: arrays, or a kernel's tensors."""

    whole: Any  # how many whole chunks there are
    begin: Any  # the first token behind them
    part: Any  # tokens of a part
    shared: Any  # parts before the request's last chunk
    second: Any  # the end of the chunk behind a half


@dataclass(frozen=True)
class Invariant(Policy):
    """The output of a request is a function of its own query, KV and length, bit by bit.

    That holds for any batch, order, sharing, padding, page ids and width of the page table, for any
    size of a CUDA graph and without one, for any largest batch, and for plans of the CPU and of the
    device. It takes an attention of this policy (``TreeAttention(policy="invariant")``), plans made
    for the current lengths, and queries, outputs and caches that begin at multiples of 16 bytes, as
    hosts' do. Pages that hold the same tokens in two copies must have equal bits. The reasons:

    - A request's length alone tells its chunks, and so its partial results.
    - A request's last chunk takes the small tile, if the tile holds a query. All other chunks take
      the large tile or the ordered tile, a small one whose blocks and sums have the large tile's
      order: both give the same bits, so the number of requests may choose. Within a tile shape, the
      bits of a row depend neither on its place nor on other rows.
    - Partial results merge in the order of chunks, and their number tells how.

    The head shape, the KV cache's dtype and the GPU decide `short_tokens` (:meth:`for_target`), so
    they are part of the function. So are the plan's number of query tokens, because a draft's token
    need not have the bits of a decode step, and whether the cache spans more than 64 GiB.
    """

    name: ClassVar[str] = INVARIANT

    short_tokens: int = 4 * CHUNK  # at a request's begin, in chunks of CHUNK tokens

    def __post_init__(self) -> None:
        if self.short_tokens < CHUNK or self.short_tokens % CHUNK:
            raise PolicyError(
                f"short_tokens is {self.short_tokens}; expected a multiple of {CHUNK}"
            )

    @classmethod
    def for_target(cls, target: Target) -> "Invariant":
        """The policy with as many short chunks as cost a query least.

        A query pays for each chunk: its partial result, and its share of a full tile's item. And it
        reads about half a part of its end by itself, behind the tokens that it shares. The length
        of chunks that balances the two grows as the square root of the prefix.
        """
        tiles, programs = target.costs.tiles, target.tile_programs[1]
        of_chunk = target.partial_ns + tiles.item_ns[1] / (programs * target.largest_tile)
        of_token = tiles.token_ns[1] / (programs * PARTS)
        chunks = LONGER_FROM * of_token / (of_chunk * CHUNK)
        return cls(CHUNK << max(round(math.log2(chunks)), 0))

    def __str__(self) -> str:
        short, rest = (
            f"chunks of {CHUNK} tokens up to {self.short_tokens}",
            f"{2 * CHUNK} and more",
        )
        return f"{self.name}, {short}, then of {rest}"

    @property
    def rules(self) -> Rules:
        return Rules("all", ABSOLUTE, self.short_tokens)

    def _whole_at(self, token: Int64Array) -> Int64Array:
        unit = np.maximum(token - self.short_tokens, 0) // (2 * CHUNK)
        octave = np.frexp(np.maximum(unit // PER_OCTAVE, 1))[1] - 1
        longer = self.short_tokens // CHUNK + octave * PER_OCTAVE + (unit >> octave)
        return np.where(token < self.short_tokens, token // CHUNK, longer)

    def _begin_of(self, chunk: Int64Array) -> Int64Array:
        longer = chunk - self.short_tokens // CHUNK
        octave = np.maximum(longer // PER_OCTAVE - 1, 0)
        begin = self.short_tokens + (longer - octave * PER_OCTAVE << octave) * (2 * CHUNK)
        return np.where(longer < 0, chunk * CHUNK, begin)

    def end_of(self, length: Int64Array | int) -> End:
        """How requests of so many tokens end."""
        last = np.maximum(np.asarray(length, dtype=np.int64) - 1, 0)
        whole = self._whole_at(last)
        # A request that ends soon behind a whole chunk does not have that chunk.
        local = self._begin_of(whole + 1) - self._begin_of(whole)
        whole = self._whole_at(np.maximum(last - local // 4, 0))
        begin = self._begin_of(whole)
        part = (self._begin_of(whole + 1) - begin) // PARTS
        shared = np.minimum((last - begin) // part, PARTS)
        return End(whole, begin, part, shared, np.where(shared == PARTS, PARTS * 3 // 4, shared))

    def chunk_at(self, token: Int64Array | int, length: Int64Array | int) -> Int64Array:
        """The chunk that holds each token of a request of `length` tokens, by its position.

        >>> Invariant(512).chunk_at(np.array([0, 511, 512, 1023, 1024, 1279, 1280]), 1300).tolist()
        [0, 0, 1, 1, 2, 2, 3]
        """
        end, token = self.end_of(length), np.asarray(token)
        at = (token - end.begin) // end.part
        first = (end.shared > 0) & (at >= np.minimum(end.shared, PARTS // 2))
        second = (end.shared > PARTS // 2) & (at >= end.second)
        behind = sum((first, second, (end.shared == PARTS) & (at >= PARTS)))
        return np.where(token < end.begin, self._whole_at(token), end.whole + behind)

    def begin_of(self, chunk: Int64Array | int, length: Int64Array | int) -> Int64Array:
        """The position of the first token of each chunk of a request of `length` tokens; of the one
        behind them, `length` or more.

        >>> Invariant(512).begin_of(np.arange(4), 1300).tolist()
        [0, 512, 1024, 1280]
        """
        end, later = self.end_of(length), 2 * PARTS
        behind = np.asarray(chunk) - end.whole
        parts = np.where(end.shared > 0, np.minimum(end.shared, PARTS // 2), later)
        second = np.where(end.shared > PARTS // 2, end.second, later)
        third = np.where(end.shared == PARTS, PARTS, later)
        parts = np.choose(np.clip(behind, 1, 4) - 1, [parts, second, third, later])
        return np.where(
            behind <= 0, self._begin_of(np.asarray(chunk)), end.begin + parts * end.part
        )

    def num_chunks(self, length: int) -> int:
        """Chunks of a request of so many tokens: its partial results."""
        return int(self.chunk_at(max(length - 1, 0), length)) + 1

    def most_chunks(self, length: int) -> int:
        """At least as many chunks as any request of up to so many tokens has."""
        return int(self.end_of(length).whole) + 4

    def check_workspace(self, max_queries: int, max_tokens: int, result_bytes: int) -> None:
        """Raise PolicyError if partial results, each of `result_bytes`, exceed WORKSPACE_LIMIT.

        A batch has `max_queries` queries at most, of requests of `max_tokens` tokens at most.
        """
        chunks = self.most_chunks(max_tokens)
        if max_queries * chunks * result_bytes > WORKSPACE_LIMIT:
            most = WORKSPACE_LIMIT // (chunks * result_bytes)
            raise PolicyError(
                f"policy {self.name} keeps room for {chunks} partial results of each query, and "
                f"those of {max_queries} queries exceed {WORKSPACE_LIMIT >> 20} MiB; allow at most "
                f"{most} at a time, or shorter requests"
            )

    def group(self, forest: PrefixForest, target: Target) -> Grouping:
        forest = self._in_whole_chunks(forest)
        ranges = grouped_ranges(forest, np.full(forest.num_nodes, True))
        length = forest.seq_lens.astype(np.int64)[ranges.order[ranges.first]]
        first = self.chunk_at(ranges.begin, length)
        last = self.chunk_at(np.maximum(ranges.end - 1, ranges.begin), length)
        of = np.repeat(np.arange(len(first)), last - first + 1)  # the range of each group
        chunk, length = concatenated_ranges(first, last - first + 1), length[of]
        is_last = forest.is_leaf[ranges.node[of]] & (chunk == last[of])
        start, stop = (self.begin_of(each, length) for each in (chunk, chunk + 1))
        held = ranges.queries[of]
        items = int(np.where(is_last, 1, -(-held // target.largest_tile)).sum())
        check_limits(self.name, Limits(items, int(held.sum()), segments=items), target)
        grouping = groups_of(ranges, of, start, stop, is_last)
        few = held <= target.ordered_queries(forest.batch_size)
        return replace(grouping, least_shape=np.where(is_last, 0, np.where(few, ORDERED, 1)))

    def _in_whole_chunks(self, forest: PrefixForest) -> PrefixForest:
        """The forest in which requests share whole chunks only, and never their last tokens."""
        length = forest.seq_lens.astype(np.int64)[forest.order]
        limit = np.maximum(length - 1, 0) // forest.page_size * forest.page_size
        shared = forest.shared.astype(np.int64)
        shared = np.minimum(shared, np.minimum(limit[:-1], limit[1:]))
        shared = np.minimum(shared, self.alike(length[:-1], length[1:]))
        whole = self.begin_of(self.chunk_at(shared, length[:-1]), length[:-1])
        return build_forest(forest.order, whole.astype(np.int32), forest.seq_lens)

    def alike(self, length: Int64Array, other_length: Int64Array) -> Int64Array:
        """The token up to which requests of both lengths have the same chunks."""
        end, other = self.end_of(length), self.end_of(other_length)
        half = np.where(np.minimum(end.shared, other.shared) >= PARTS // 2, PARTS // 2, 0)
        alike = np.where(end.second == other.second, end.second, half)
        alike = np.where(end.shared == other.shared, end.shared, alike) * end.part
        least = np.minimum(end.begin, other.begin)
        return np.where(end.begin == other.begin, end.begin + alike, least)
