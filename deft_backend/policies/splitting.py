"""Groups of one KV range each, and the ways to cut them: evenly, or by a size, within limits.

Every policy except `deft-flatten` works in two steps. First it assigns ranges to queries, then it
cuts long ranges. Each policy has its own first step; this module holds the second.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deft_backend.forest import Int32Array, PrefixForest
from deft_backend.policies.grouping import Grouping
from deft_backend.policies.policy import PolicyError
from deft_backend.policies.target import Target

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class KVRanges:
    """Groups of one KV range each, before cutting. NumPy arrays, ``R`` ranges.

    Attributes
    ----------
    request, start, end : [R] int32
        Positions ``start … end - 1`` of a request's context.
    open : [R] bool
        Whether the range ends where its request currently ends.
    query_ptr : [R + 1] int32, queries : int32
        Request indices of the queries that attend to the range.
    """

    request: Int32Array
    start: Int32Array
    end: Int32Array
    open: npt.NDArray[np.bool_]
    query_ptr: Int32Array
    queries: Int32Array

    @property
    def tokens(self) -> Int64Array:
        """[R] KV tokens of each range."""
        return (self.end - self.start).astype(np.int64)

    @property
    def num_queries(self) -> Int64Array:
        """[R] queries of each range."""
        return np.diff(self.query_ptr).astype(np.int64)


def concatenated_ranges(
    begin: npt.NDArray[np.integer], count: npt.NDArray[np.integer]
) -> Int64Array:
    """``begin[0], begin[0] + 1, …`` (``count[0]`` numbers), then likewise for each other
    element."""
    count = count.astype(np.int64)
    first = np.cumsum(count) - count
    values: Int64Array = np.arange(int(count.sum()), dtype=np.int64) + np.repeat(
        begin - first, count
    )
    return values


def offsets(count: npt.NDArray[np.integer]) -> Int32Array:
    """Pointer array ``0, count[0], count[0] + count[1], …``."""
    return np.concatenate(([0], np.cumsum(count))).astype(np.int32)


def node_ranges(forest: PrefixForest) -> KVRanges:
    """KV-guided grouping (DeFT, section 3.3): one range for each node and all its queries.

    Empty leaves keep a range of no tokens, because their query's context will grow there.
    """
    return KVRanges(
        request=forest.request,
        start=forest.start,
        end=forest.end,
        open=forest.is_leaf,
        query_ptr=offsets(forest.num_queries),
        queries=forest.order[concatenated_ranges(forest.query_begin, forest.num_queries)],
    )


def query_ranges(forest: PrefixForest) -> KVRanges:
    """Q-guided grouping (DeFT, section 3.3): one range for each query, its whole context."""
    batch = forest.batch_size
    return KVRanges(
        request=forest.order,
        start=np.zeros(batch, dtype=np.int32),
        end=forest.seq_lens[forest.order],
        open=np.ones(batch, dtype=bool),
        query_ptr=np.arange(batch + 1, dtype=np.int32),
        queries=forest.order,
    )


def query_tiles(num_queries: npt.NDArray[np.integer], target: Target) -> Int64Array:
    """Query tiles of groups of `num_queries` queries; each tile loads the group's KV once."""
    largest = max(1, target.largest_tile)
    return -(-num_queries.astype(np.int64) // largest)


def group_tiles(grouping: Grouping, target: Target) -> Int64Array:
    """[G] query tiles of each group: masked tiles for groups that need spans."""
    queries = grouping.num_queries()
    masked = -(-queries.astype(np.int64) // max(1, target.tile_queries[-1]))
    return np.where(grouping.several_ranges, masked, query_tiles(queries, target))


def chunks_by(tokens: Int64Array, chunk_tokens: int) -> Int64Array:
    """Chunks of at most `chunk_tokens` that hold `tokens`; an empty range is one chunk."""
    return np.maximum(1, -(-tokens // chunk_tokens))


def fit_chunk_tokens(
    policy: str,
    ranges: KVRanges,
    target: Target,
    *,
    fill_programs: bool,
    minimum: int | None = None,
) -> int:
    """Smallest chunk size, in whole KV blocks, whose chunks stay within every limit.

    Parameters
    ----------
    policy : str
        The policy's name, for the error.
    ranges : KVRanges
        The ranges to cut.
    target : Target
        Its `max_groups` and `max_group_queries` are the limits.
    fill_programs : bool
        Also stop once the chunks fill `target.num_programs` thread blocks. Finer chunks would add
        partial results but no parallelism (FastTree, long-context splitting; Flash-Decoding).
    minimum : int, optional
        Smallest size to consider, in tokens; default: one KV block.

    Raises
    ------
    PolicyError
        If even uncut ranges are more than the limits allow.
    """
    block = target.block_tokens
    tokens, queries = ranges.tokens, ranges.num_queries
    check_limits(policy, len(tokens), int(queries.sum()), target)
    tiles = query_tiles(queries, target)

    def fits(chunk: int) -> bool:
        num_chunks = chunks_by(tokens, chunk)
        if num_chunks.sum() > target.max_groups or num_chunks @ queries > target.max_group_queries:
            return False
        # Each chunk of a cut range takes a thread block; ranges shorter than a chunk share blocks.
        # Cut a context much longer than the rest (long tail) even if the rest fills the GPU.
        blocks = tiles * np.where(tokens > chunk, num_chunks, tokens / chunk)
        return not fill_programs or bool(blocks.sum() <= target.num_programs)

    low = -(-(minimum or block) // block)
    high = max(low, -(-int(tokens.max(initial=0)) // block))
    while low < high:  # the largest size needs no test: it cuts nothing
        middle = (low + high) // 2
        if fits(middle * block):
            high = middle
        else:
            low = middle + 1
    return low * block


def check_limits(policy: str, groups: int, pairs: int, target: Target) -> None:
    """Refuse more groups or (group, query) pairs than `target` allows."""
    for what, held, limit in (
        ("groups", groups, target.max_groups),
        ("(group, query) pairs", pairs, target.max_group_queries),
    ):
        if held > limit:
            raise PolicyError(
                f"{policy} makes {held} {what} of this batch and the plan holds {limit}; "
                "raise the plan's capacity or choose flash-decoding"
            )


def cut_evenly(ranges: KVRanges, num_chunks: Int64Array, block_tokens: int) -> Grouping:
    """Cut range ``r`` into ``num_chunks[r]`` chunks of equal length, in whole KV blocks.

    A range with fewer KV blocks than that becomes one chunk for each block.
    """
    tokens = ranges.tokens
    blocks = np.maximum(1, -(-tokens // block_tokens))
    num_chunks = np.clip(num_chunks, 1, blocks)
    owner = np.repeat(np.arange(len(num_chunks)), num_chunks)
    nth = concatenated_ranges(np.zeros(len(num_chunks), dtype=np.int64), num_chunks)
    begin = nth * blocks[owner] // num_chunks[owner] * block_tokens
    stop = (nth + 1) * blocks[owner] // num_chunks[owner] * block_tokens
    return _chunks(ranges, owner, nth + 1 == num_chunks[owner], begin, stop)


def cut_by(ranges: KVRanges, chunk_tokens: int) -> Grouping:
    """Cut every range into chunks of `chunk_tokens`; the last chunk holds the rest."""
    num_chunks = chunks_by(ranges.tokens, chunk_tokens)
    owner = np.repeat(np.arange(len(num_chunks)), num_chunks)
    nth = concatenated_ranges(np.zeros(len(num_chunks), dtype=np.int64), num_chunks)
    return _chunks(
        ranges, owner, nth + 1 == num_chunks[owner], nth * chunk_tokens, (nth + 1) * chunk_tokens
    )


def _chunks(
    ranges: KVRanges,
    owner: Int64Array,
    last: npt.NDArray[np.bool_],
    begin: Int64Array,
    stop: Int64Array,
) -> Grouping:
    """The groups of chunks, given as offsets into their ranges."""
    start = ranges.start[owner] + begin
    end = np.minimum(ranges.start[owner] + stop, ranges.end[owner])
    count = ranges.num_queries[owner]
    return Grouping(
        query_ptr=offsets(count),
        queries=ranges.queries[concatenated_ranges(ranges.query_ptr[owner], count)],
        segment_ptr=np.arange(len(owner) + 1, dtype=np.int32),
        request=ranges.request[owner],
        start=start.astype(np.int32),
        end=end.astype(np.int32),
        open=ranges.open[owner] & last,  # only the last chunk grows with its request
        attend_begin=np.zeros(len(owner), dtype=np.int32),
        attend_end=count.astype(np.int32),
    )


def reordered(grouping: Grouping, order: Int64Array) -> Grouping:
    """The same groups in another order; each has one range, which all its queries attend to."""
    count = np.diff(grouping.query_ptr)[order]
    return Grouping(
        query_ptr=offsets(count),
        queries=grouping.queries[concatenated_ranges(grouping.query_ptr[order], count)],
        segment_ptr=grouping.segment_ptr,
        request=grouping.request[order],
        start=grouping.start[order],
        end=grouping.end[order],
        open=grouping.open[order],
        attend_begin=grouping.attend_begin,
        attend_end=count.astype(np.int32),
    )
