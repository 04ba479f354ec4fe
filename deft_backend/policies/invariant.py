"""`invariant`: KV is cut at fixed positions, so a request's output depends on that request alone.

Chunk ``k`` of a context has the same first and last position in every request and every batch. The
first ``2 * per_octave`` chunks have `chunk_tokens` tokens each. From there on, chunks are twice as
long in each octave, like the gaps between floating-point numbers. So long contexts have few chunks,
and no chunk is longer than a small part of the context before it.

Requests read a chunk together if they share all of it. A request's last chunk is its own.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import numpy as np

from deft_backend.forest import PrefixForest, build_forest
from deft_backend.policies.edges import Int64Array, grouped_ranges
from deft_backend.policies.grouping import Grouping, concatenated_ranges
from deft_backend.policies.policy import ABSOLUTE, OCTAVE_LIMIT, Policy, Rules
from deft_backend.policies.target import PolicyError, Target
from deft_backend.settings.policy_names import INVARIANT

SHORTEST_CHUNK, MOST_PER_OCTAVE, LEAST_PER_OCTAVE = 256, 16, 4
"""Tokens of the first chunks, and chunks of an octave. A plan of the largest batch must fit, so a
server of many or long requests has fewer chunks in an octave, and then longer ones."""

WORKSPACE_LIMIT = 512 << 20
"""Most bytes of partial results of the largest batch."""


class Places(NamedTuple):
    """Where chunks begin."""

    chunk_tokens: int  # of the first chunks
    per_octave: int  # chunks of an octave, a power of two

    def chunk_at(self, token: Int64Array | int) -> Int64Array:
        """The chunk that holds each token, by its position.

        >>> Places(256, 16).chunk_at(np.array([0, 255, 256, 8191, 8192, 8703, 8704])).tolist()
        [0, 0, 1, 31, 32, 32, 33]
        """
        unit = np.asarray(token) // self.chunk_tokens
        octave = np.frexp(np.maximum(unit // self.per_octave, 1))[1] - 1
        chunk: Int64Array = octave * self.per_octave + (unit >> octave)
        return chunk

    def begin_of(self, chunk: Int64Array | int) -> Int64Array:
        """The position of each chunk's first token.

        >>> Places(256, 16).begin_of(np.array([0, 1, 31, 32, 33, 48])).tolist()
        [0, 256, 7936, 8192, 8704, 16384]
        """
        octave = np.maximum(np.asarray(chunk) // self.per_octave - 1, 0)
        begin: Int64Array = (chunk - octave * self.per_octave << octave) * self.chunk_tokens
        return begin


_USUAL = Places(SHORTEST_CHUNK, MOST_PER_OCTAVE)


@dataclass(frozen=True)
class Invariant(Policy):
    """The output of a request is a function of its own query, KV and length, bit by bit.

    That holds for any batch, order, sharing, padding, page ids and width of the page table, for any
    size of a CUDA graph and without one, and for plans of the CPU and of the device. It takes an
    attention of this policy (``TreeAttention(policy="invariant")``), and plans made for the current
    lengths. The reasons:

    - Chunks begin at fixed positions, so a request's length tells its partial results.
    - A request's last chunk takes the small tile, if the tile holds a query. All other chunks take
      the large tile, however many requests read them. Within a tile shape, the bits of a row depend
      neither on its place nor on other rows.
    - Partial results merge in the order of chunks, and their number tells how.

    The attention's limits decide the length of chunks, so they are part of the function. So is the
    number of query tokens: a draft's token need not have the bits of a decode step.

    A request that ends or branches inside a chunk reads that chunk by itself.
    """

    name: ClassVar[str] = INVARIANT
    several_segments: ClassVar[bool] = False

    places: Places = _USUAL

    def __post_init__(self) -> None:
        tokens, chunks = self.places
        if tokens < 1 or not 1 <= chunks < OCTAVE_LIMIT or chunks & (chunks - 1):
            raise PolicyError(
                f"{self.places}; expected at least 1 token, and a power of two below {OCTAVE_LIMIT}"
            )

    @classmethod
    def for_limits(cls, max_queries: int, max_tokens: int, result_bytes: int) -> "Invariant":
        """The policy with chunks so short that their partial results just fit WORKSPACE_LIMIT.

        - `max_queries`: most queries of a batch.
        - `max_tokens`: most tokens of a request.
        - `result_bytes`: of a partial result.

        Raises PolicyError if not even one partial result of each query fits.
        """
        results = WORKSPACE_LIMIT // result_bytes
        if max_queries > results:
            raise PolicyError(
                f"policy {INVARIANT} needs room for a partial result of each query: "
                f"{max_queries} of {result_bytes} bytes exceed {WORKSPACE_LIMIT >> 20} MiB; "
                "choose a smaller max_batch"
            )
        tokens, chunks = SHORTEST_CHUNK, MOST_PER_OCTAVE
        found = cls(Places(tokens, chunks))
        while max_queries * found.num_chunks(max_tokens) > results:
            if chunks > LEAST_PER_OCTAVE:
                chunks //= 2
            else:
                tokens *= 2
            found = cls(Places(tokens, chunks))
        return found

    def __str__(self) -> str:
        tokens, chunks = self.places
        return f"{self.name}, {2 * chunks} chunks of {tokens} tokens and {chunks} an octave"

    @property
    def rules(self) -> Rules:
        tokens, chunks = self.places
        return Rules("all", ABSOLUTE, tokens * OCTAVE_LIMIT + chunks)

    def num_chunks(self, tokens: int) -> int:
        """Chunks of a request of so many tokens: its partial results."""
        return int(self.places.chunk_at(max(tokens - 1, 0))) + 1

    def group(self, forest: PrefixForest, target: Target) -> Grouping:
        places = self.places
        forest = _in_whole_chunks(forest, places)
        ranges = grouped_ranges(forest, np.full(forest.num_nodes, True))
        first = places.chunk_at(ranges.begin)
        chunks = places.chunk_at(np.maximum(ranges.end - 1, ranges.begin)) - first + 1
        of = np.repeat(np.arange(len(chunks)), chunks)  # the range of each group
        chunk = concatenated_ranges(first, chunks)
        queries = ranges.queries[of]
        end = np.minimum(ranges.end[of], places.begin_of(chunk + 1))
        is_last = forest.is_leaf[ranges.node[of]] & (chunk + 1 == (first + chunks)[of])
        grouping = Grouping.of_single_ranges(
            query_ptr=np.append(0, np.cumsum(queries)).astype(np.int32),
            queries=ranges.order[concatenated_ranges(ranges.first[of], queries)],
            request=ranges.order[ranges.first[of]],
            start=places.begin_of(chunk).astype(np.int32),
            end=end.astype(np.int32),
            is_open=is_last,
        )
        return replace(grouping, least_shape=np.where(is_last, 0, 1))


def _in_whole_chunks(forest: PrefixForest, places: Places) -> PrefixForest:
    """The forest in which requests share whole chunks only, and never their last tokens."""
    order, page_size = forest.order, forest.page_size
    limit = np.maximum(forest.seq_lens.astype(np.int64) - 1, 0)[order] // page_size * page_size
    # In depth-first order, the node behind a query's leaf begins where the next query's tokens
    # begin to differ.
    shared = forest.start[forest.leaf[:-1] + 1]
    shared = np.minimum(shared, np.minimum(limit[:-1], limit[1:]))
    whole = places.begin_of(places.chunk_at(shared))
    return build_forest(order, whole.astype(np.int32), forest.seq_lens)
