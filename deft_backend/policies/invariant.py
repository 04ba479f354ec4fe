"""`invariant`: a request's length cuts its KV, so its output depends on that request alone.

A request's length alone decides where its chunks begin. The first ``2 * PER_OCTAVE`` chunks have
`chunk_tokens` tokens each. From there on, chunks are twice as long in each octave, like the gaps
between floating-point numbers. So long contexts have few chunks, and no chunk is longer than a
small part of the context before it. The end of a request has one chunk of half that length or none,
and then chunks of ``1 / SHARES`` of it: requests that branch inside a chunk read it by themselves.

Requests side by side in depth-first order read a chunk together if they share all of it. That order
depends on the planner, but no bit does. A request's last chunk is its own.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from deft_backend.forest import PrefixForest, build_forest
from deft_backend.policies.edges import grouped_ranges, groups_of
from deft_backend.policies.grouping import Grouping, Int64Array, concatenated_ranges
from deft_backend.policies.policy import ABSOLUTE, PER_OCTAVE, SHARES, Policy, Rules
from deft_backend.policies.target import Limits, PolicyError, Target, check_limits
from deft_backend.settings.policy_names import INVARIANT

USUAL_PREFIX = 4096
"""Tokens of a prefix for which the first chunks have the best length."""

WORKSPACE_LIMIT = 2 << 30
"""Most bytes of partial results of the largest batch."""


@dataclass(frozen=True)
class Invariant(Policy):
    """The output of a request is a function of its own query, KV and length, bit by bit.

    That holds for any batch, order, sharing, padding, page ids and width of the page table, for any
    size of a CUDA graph and without one, for any largest batch, and for plans of the CPU and of the
    device. It takes an attention of this policy (``TreeAttention(policy="invariant")``), plans made
    for the current lengths, and queries, outputs and caches that begin at multiples of 16 bytes, as
    hosts' do. The reasons:

    - A request's length alone tells its chunks, and so its partial results.
    - A request's last chunk takes the small tile, if the tile holds a query. All other chunks take
      the large tile, however many requests read them. Within a tile shape, the bits of a row depend
      neither on its place nor on other rows.
    - Partial results merge in the order of chunks, and their number tells how.

    The head shape, the KV cache's dtype and the GPU decide `chunk_tokens` (:meth:`for_target`), so
    they are part of the function. So are the plan's number of query tokens, because a draft's token
    need not have the bits of a decode step, and whether the cache spans more than 64 GiB.
    """

    name: ClassVar[str] = INVARIANT

    chunk_tokens: int = 512  # of each of the first chunks

    def __post_init__(self) -> None:
        if self.chunk_tokens < SHARES or self.chunk_tokens % SHARES:
            raise PolicyError(
                f"chunk_tokens is {self.chunk_tokens}; expected a multiple of {SHARES}"
            )

    @classmethod
    def for_target(cls, target: Target) -> "Invariant":
        """The policy with the first chunks that cost a query least behind a usual prefix.

        A query pays for each chunk: its partial result, and its share of a full tile's item. And it
        reads about half a chunk of its end by itself, behind the tokens that it shares. The length
        is a power of two, so that costs which differ a little make no difference.
        """
        tiles, programs = target.costs.tiles, target.tile_programs[1]
        of_chunk = target.partial_ns + tiles.item_ns[1] / (programs * target.largest_tile)
        of_token = tiles.token_ns[1] / (programs * SHARES)
        return cls(1 << round(math.log2(2 * USUAL_PREFIX * of_chunk / of_token) / 2))

    def __str__(self) -> str:
        return f"{self.name}, chunks of {self.chunk_tokens} tokens and more, 1/{SHARES} at the end"

    @property
    def rules(self) -> Rules:
        return Rules("all", ABSOLUTE, self.chunk_tokens)

    def _whole_at(self, token: Int64Array) -> Int64Array:
        unit = token // self.chunk_tokens
        octave = np.frexp(np.maximum(unit // PER_OCTAVE, 1))[1] - 1
        chunk: Int64Array = octave * PER_OCTAVE + (unit >> octave)
        return chunk

    def _begin_of(self, chunk: Int64Array) -> Int64Array:
        octave = np.maximum(chunk // PER_OCTAVE - 1, 0)
        begin: Int64Array = (chunk - octave * PER_OCTAVE << octave) * self.chunk_tokens
        return begin

    def short_chunks(self, length: Int64Array | int) -> tuple[Int64Array, Int64Array, Int64Array]:
        """A request's first short chunk behind half a chunk, its first token, and its tokens."""
        last = np.maximum(np.asarray(length) - 1 - self.chunk_tokens // SHARES, 0)
        whole = self._whole_at(last)
        begin = self._begin_of(whole)
        tokens = self._begin_of(whole + 1) - begin
        halves = (last - begin) // (tokens // 2)  # 0 or 1
        return whole + halves, begin + halves * (tokens // 2), tokens // SHARES

    def chunk_at(self, token: Int64Array | int, length: Int64Array | int) -> Int64Array:
        """The chunk that holds each token of a request of `length` tokens, by its position.

        >>> Invariant(256).chunk_at(np.array([0, 255, 256, 383, 384, 511]), 512).tolist()
        [0, 0, 1, 1, 2, 3]
        """
        first, begin, tokens = self.short_chunks(length)
        short = first + (token - begin) // tokens
        return np.where(token < begin, self._whole_at(np.asarray(token)), short)

    def begin_of(self, chunk: Int64Array | int, length: Int64Array | int) -> Int64Array:
        """The position of the first token of each chunk of a request of `length` tokens.

        >>> Invariant(256).begin_of(np.arange(5), 512).tolist()
        [0, 256, 384, 448, 512]
        """
        first, begin, tokens = self.short_chunks(length)
        short = begin + (chunk - first) * tokens
        return np.where(chunk < first, self._begin_of(np.asarray(chunk)), short)

    def num_chunks(self, length: int) -> int:
        """Chunks of a request of so many tokens: its partial results."""
        return int(self.chunk_at(max(length - 1, 0), length)) + 1

    def most_chunks(self, length: int) -> int:
        """Chunks of a request of up to so many tokens; a shorter request may have more."""
        first, begin, _ = self.short_chunks(length)
        earlier = int(self._whole_at(begin)) + SHARES // 2 + 1 if first else 0
        return max(self.num_chunks(length), earlier)

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
        return replace(grouping, least_shape=np.where(is_last, 0, 1))

    def _in_whole_chunks(self, forest: PrefixForest) -> PrefixForest:
        """The forest in which requests share whole chunks only, and never their last tokens."""
        length = forest.seq_lens.astype(np.int64)[forest.order]
        limit = np.maximum(length - 1, 0) // forest.page_size * forest.page_size
        shared = forest.shared.astype(np.int64)
        # Requests whose short chunks begin at other positions share whole chunks only.
        _, begin, _ = self.short_chunks(length)
        whole = self._begin_of(self._whole_at(np.minimum(begin[:-1], begin[1:])))
        whole = np.where(begin[:-1] == begin[1:], shared, whole)
        shared = np.minimum(np.minimum(shared, whole), np.minimum(limit[:-1], limit[1:]))
        whole = self.begin_of(self.chunk_at(shared, length[:-1]), length[:-1])
        return build_forest(forest.order, whole.astype(np.int32), forest.seq_lens)
