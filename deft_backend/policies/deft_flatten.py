"""`deft-flatten`: the flattened tree in even chunks, with bit causal masks."""

from dataclasses import dataclass
from operator import gt
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from deft_backend.forest import PrefixForest
from deft_backend.policies.grouping import Grouping, Int64Array, concatenated_ranges
from deft_backend.policies.policy import FLATTENED, Policy, Rules
from deft_backend.policies.target import Limits, PolicyError, Target, check_limits
from deft_backend.settings.policy_names import DEFT_FLATTEN
from deft_backend.shapes import MAX_ITEM_TOKENS


@dataclass(frozen=True)
class DeftFlatten(Policy):
    """DeFT-Flatten (DeFT, Remark 3.1 and Algorithm 3): flattened tree KV splitting.

    - *Depth-first flatten*: nodes follow one another in depth-first order, which maximises the
      overlap of the queries of neighbouring nodes.
    - *Evenly block-wise*: the flattened KV is cut into ``m`` chunks of ``S_t`` tokens
      (`chunk_tokens`), whatever the nodes' lengths. The paper's ``m`` is ``N_tree / S_t``, rounded
      up; here a rest of less than half a chunk joins the last chunk.
    - *Bit mask*: a chunk's queries are the union of the queries of its nodes. DeFT records in
      64-bit integers which queries attend to which nodes. In depth-first order these bits are a run
      of ones, so its two ends serve any number of queries.

    An empty leaf becomes an open range of no tokens behind the previous node. Chunks are 2, 4, …
    times as long, up to `longer`, if the programs cannot hold all of them at once, and longer still
    if the plan cannot hold them.

    Requests whose tokens are in one chunk share its matrix products: a NaN or infinity in the keys
    or values of one, times a masked weight of 0, is a NaN for the others. Under every other policy,
    a group's queries attend to all of its tokens.
    """

    name: ClassVar[str] = DEFT_FLATTEN
    several_segments: ClassVar[bool] = True

    chunk_tokens: int = 128  # KV tokens of a chunk; DeFT uses 128
    longer: int = 4  # how many times as long chunks may be for the programs' sake

    def __post_init__(self) -> None:
        if self.chunk_tokens < 1:
            raise PolicyError(f"chunk_tokens is {self.chunk_tokens}; expected at least 1")

    @property
    def rules(self) -> Rules:
        return Rules(FLATTENED, "fixed", self.chunk_tokens)

    def group(self, forest: PrefixForest, target: Target) -> Grouping:
        chunk = self.chunk_tokens
        programs = target.tile_programs[-1]
        while True:
            most = _most(forest, chunk, target)
            many = _num_chunks(forest, chunk) > programs and chunk < self.longer * self.chunk_tokens
            if not many and not any(map(gt, most, target.limits)):
                return _flatten(forest, chunk)
            if 3 * chunk > MAX_ITEM_TOKENS:  # the last of chunks twice as long may be too long
                check_limits(self.name, most, target)
                return _flatten(forest, chunk)
            chunk *= 2


def _most(forest: PrefixForest, chunk: int, target: Target) -> Limits:
    """Bounds of the items, (item, query) pairs and KV ranges of chunks of `chunk` tokens.

    They are the device planner's (``planner/on_device/flatten.py``), which cannot count each
    candidate's items. A chunk's queries are at most those of its slices. An even tile is more than
    half full, so `q` queries in a row meet at most ``(q - 1) // half + 2`` tiles; one meets one.
    """
    queries = forest.num_queries.astype(np.int64)
    first, last = _blocks(forest, chunk)
    slices = last - first + 1
    groups = int(last.max(initial=-1)) + 1
    held = max(1, min(target.tile_queries[-1], target.largest_tile))
    met = np.where(queries == 1, 1, (queries - 1) // max(1, held // 2) + 2)
    pairs, segments = int((slices * queries).sum()), int((slices * met).sum())
    again = segments // target.tile_segments[-1]
    items = max(2 * groups, pairs // held + groups + again)
    return Limits(items, pairs + again * max(target.tile_queries[-1], 1), segments)


def _flatten(forest: PrefixForest, chunk: int) -> Grouping:
    """Slice the flattened tree into chunks of `chunk` tokens (DeFT, Algorithm 3: Slice)."""
    node, begin, end, block = _slices(forest, chunk)
    first = np.flatnonzero(np.diff(block, prepend=-1))  # first slice of each chunk
    segment_ptr = np.append(first, len(node)).astype(np.int32)

    # Neighbours in depth-first order have overlapping or adjacent queries. So the union over a
    # chunk is one range in forest order.
    slice_from = forest.query_begin[node].astype(np.int64)
    slice_to = forest.query_end[node].astype(np.int64)
    if len(first):
        query_from = np.minimum.reduceat(slice_from, first)
        query_to = np.maximum.reduceat(slice_to, first)
    else:
        query_from = query_to = np.zeros(0, dtype=np.int64)

    owner = np.repeat(np.arange(len(first)), np.diff(segment_ptr))
    return Grouping(
        query_ptr=np.append(0, np.cumsum(query_to - query_from)).astype(np.int32),
        queries=forest.order[concatenated_ranges(query_from, query_to - query_from)],
        segment_ptr=segment_ptr,
        request=forest.request[node],
        start=begin,
        end=end,
        open=forest.is_leaf[node] & (end == forest.end[node]),
        attend_begin=(slice_from - query_from[owner]).astype(np.int32),
        attend_end=(slice_to - query_from[owner]).astype(np.int32),
    )


def _num_chunks(forest: PrefixForest, chunk: int) -> int:
    """Chunks of a forest; a rest of less than half a chunk adds none."""
    return max(1, (2 * int(forest.length.sum(dtype=np.int64)) + chunk) // (2 * chunk))


def _blocks(forest: PrefixForest, chunk: int) -> tuple[Int64Array, Int64Array]:
    """First and last chunk of every node."""
    flat_end = np.cumsum(forest.length.astype(np.int64))
    last = np.minimum(np.maximum(flat_end - 1, 0) // chunk, _num_chunks(forest, chunk) - 1)
    # An empty leaf at a chunk's edge joins the chunk of the previous token.
    return np.minimum((flat_end - forest.length) // chunk, last), last


def _slices(
    forest: PrefixForest, chunk: int
) -> tuple[Int64Array, npt.NDArray[np.int32], npt.NDArray[np.int32], Int64Array]:
    """Node, begin, end and chunk of every slice: nodes are cut where chunks end."""
    flat_end = np.cumsum(forest.length.astype(np.int64))
    flat_begin = flat_end - forest.length
    first_block, last_block = _blocks(forest, chunk)
    count = last_block - first_block + 1
    node = np.repeat(np.arange(forest.num_nodes), count)
    block = concatenated_ranges(first_block, count)
    shift = forest.start[node] - flat_begin[node]
    begin = np.maximum(block * chunk, flat_begin[node]) + shift
    end = np.where(block < last_block[node], (block + 1) * chunk, flat_end[node]) + shift
    begin = np.minimum(begin, end)
    return node, begin.astype(np.int32), end.astype(np.int32), block
