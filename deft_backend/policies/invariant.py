"""`invariant`: KV is cut at fixed positions, so a request's output depends on that request alone.

Chunk ``k`` of a context has the same first and last position in every request and every batch. The
first ``2 * PER_OCTAVE`` chunks have `chunk_tokens` tokens each. From there on, chunks are twice as
long in each octave, like the gaps between floating-point numbers. So long contexts have few chunks,
and no chunk is longer than a small part of the context before it.

Requests read a chunk together if they share all of it. A request's last chunk is its own.
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from deft_backend.forest import PrefixForest, build_forest
from deft_backend.policies.edges import grouped_ranges
from deft_backend.policies.grouping import Grouping, Int64Array, concatenated_ranges
from deft_backend.policies.policy import ABSOLUTE, PER_OCTAVE, Policy, Rules
from deft_backend.policies.target import PolicyError, Target
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

    - Chunks begin at fixed positions, so a request's length tells its partial results.
    - A request's last chunk takes the small tile, if the tile holds a query. All other chunks take
      the large tile, however many requests read them. Within a tile shape, the bits of a row depend
      neither on its place nor on other rows.
    - Partial results merge in the order of chunks, and their number tells how.

    The head shape, the KV cache's dtype and the GPU decide `chunk_tokens` (:meth:`for_target`), so
    they are part of the function. So are the plan's number of query tokens, because a draft's token
    need not have the bits of a decode step, and whether the cache spans more than 64 GiB.

    A request that ends or branches inside a chunk reads that chunk by itself.
    """

    name: ClassVar[str] = INVARIANT

    chunk_tokens: int = 256  # of each of the first chunks

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise PolicyError(f"chunk_tokens is {self.chunk_tokens}; expected at least 1")

    @classmethod
    def for_target(cls, target: Target) -> "Invariant":
        """The policy with the first chunks that cost a query least behind a usual prefix.

        A query pays for each chunk: its partial result, and its share of a full tile's item. And it
        reads about half a chunk by itself, behind the tokens that it shares in whole chunks. The
        length is a power of two, so that costs which differ a little make no difference.
        """
        tiles, programs = target.costs.tiles, target.tile_programs[1]
        of_chunk = target.partial_ns + tiles.item_ns[1] / (programs * target.largest_tile)
        of_token = tiles.token_ns[1] / programs
        return cls(1 << round(math.log2(2 * USUAL_PREFIX * of_chunk / of_token) / 2))

    def __str__(self) -> str:
        return f"{self.name}, chunks of {self.chunk_tokens} tokens and more"

    @property
    def rules(self) -> Rules:
        return Rules("all", ABSOLUTE, self.chunk_tokens)

    def chunk_at(self, token: Int64Array | int) -> Int64Array:
        """The chunk that holds each token, by its position.

        >>> Invariant(256).chunk_at(np.array([0, 255, 256, 8191, 8192, 8703, 8704])).tolist()
        [0, 0, 1, 31, 32, 32, 33]
        """
        unit = np.asarray(token) // self.chunk_tokens
        octave = np.frexp(np.maximum(unit // PER_OCTAVE, 1))[1] - 1
        chunk: Int64Array = octave * PER_OCTAVE + (unit >> octave)
        return chunk

    def begin_of(self, chunk: Int64Array | int) -> Int64Array:
        """The position of each chunk's first token.

        >>> Invariant(256).begin_of(np.array([0, 1, 31, 32, 33, 48])).tolist()
        [0, 256, 7936, 8192, 8704, 16384]
        """
        octave = np.maximum(np.asarray(chunk) // PER_OCTAVE - 1, 0)
        begin: Int64Array = (chunk - octave * PER_OCTAVE << octave) * self.chunk_tokens
        return begin

    def num_chunks(self, tokens: int) -> int:
        """Chunks of a request of so many tokens: its partial results."""
        return int(self.chunk_at(max(tokens - 1, 0))) + 1

    def check_workspace(self, max_queries: int, max_tokens: int, result_bytes: int) -> None:
        """Raise PolicyError if the partial results of the largest batch exceed WORKSPACE_LIMIT.

        - `max_queries`: most queries of a batch.
        - `max_tokens`: most tokens of a request.
        - `result_bytes`: of a partial result.
        """
        chunks = self.num_chunks(max_tokens)
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
        first = self.chunk_at(ranges.begin)
        chunks = self.chunk_at(np.maximum(ranges.end - 1, ranges.begin)) - first + 1
        of = np.repeat(np.arange(len(chunks)), chunks)  # the range of each group
        chunk = concatenated_ranges(first, chunks)
        queries = ranges.queries[of]
        end = np.minimum(ranges.end[of], self.begin_of(chunk + 1))
        is_last = forest.is_leaf[ranges.node[of]] & (chunk + 1 == (first + chunks)[of])
        grouping = Grouping.of_single_ranges(
            query_ptr=np.append(0, np.cumsum(queries)).astype(np.int32),
            queries=ranges.order[concatenated_ranges(ranges.first[of], queries)],
            request=ranges.order[ranges.first[of]],
            start=self.begin_of(chunk).astype(np.int32),
            end=end.astype(np.int32),
            is_open=is_last,
        )
        return replace(grouping, least_shape=np.where(is_last, 0, 1))

    def _in_whole_chunks(self, forest: PrefixForest) -> PrefixForest:
        """The forest in which requests share whole chunks only, and never their last tokens."""
        order, page_size = forest.order, forest.page_size
        limit = np.maximum(forest.seq_lens.astype(np.int64) - 1, 0)[order] // page_size * page_size
        # In depth-first order, the node behind a query's leaf begins where the next query's tokens
        # begin to differ.
        shared = forest.start[forest.leaf[:-1] + 1]
        shared = np.minimum(shared, np.minimum(limit[:-1], limit[1:]))
        whole = self.begin_of(self.chunk_at(shared))
        return build_forest(order, whole.astype(np.int32), forest.seq_lens)
