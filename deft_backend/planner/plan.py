"""Plan: a grouping cut into the kernels' work items, in arrays of fixed capacity on the device."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from deft_backend.planner.encoding import ITEM_ORDER, OPEN_END

WORKSPACE_LIMIT = 256 << 20
"""Most bytes of partial results that a plan's capacity asks for by itself."""


@dataclass(frozen=True)
class PlanCapacity:
    """Sizes of a plan's arrays: of the largest batch and the machine, never of the contexts.

    Attributes
    ----------
    max_batch : int
        Requests.
    max_items : int
        Work items (KV range × query tile).
    max_entries : int
        (item, query) pairs; also the partial results that the workspace holds.
    max_segments : int
        KV ranges; more than items only where leaves are packed or the tree is flattened.
    """

    max_batch: int
    max_items: int
    max_entries: int
    max_segments: int

    @classmethod
    def for_batch(
        cls, max_batch: int, num_programs: int = 132, entry_bytes: int = 0
    ) -> PlanCapacity:
        """Room for every tree over `max_batch` requests, each KV range split for `num_programs`.

        A forest over B queries has at most 2B - 1 nodes. Splitting long nodes adds at most a few
        items a program; every query takes part in 12 items on average (a policy that wants more
        is coarsened by the planner until it fits), fewer where `entry_bytes`, the bytes of one
        query's partial result, would make the workspace larger than WORKSPACE_LIMIT. Two items
        a query and one a program always fit.
        """
        items = 4 * max_batch + 8 * num_programs
        entries = 12 * max_batch + 8 * num_programs
        if entry_bytes:
            entries = min(entries, WORKSPACE_LIMIT // entry_bytes)
        return cls(
            max_batch=max_batch,
            max_items=items,
            max_entries=max(entries, 2 * max_batch + num_programs),
            max_segments=items + 2 * max_batch,
        )


@dataclass(frozen=True, eq=False)
class Plan:
    """Stage 1's items and stage 2's reduction, as host arrays cut to their counts.

    Attributes
    ----------
    tile_ptr : [len(ITEM_ORDER) + 1] int32
        Items of shape ``ITEM_ORDER[p]`` are those from ``tile_ptr[p]`` to ``tile_ptr[p + 1]``,
        longest first.
    item_segment_ptr : [I + 1] int32, item_query_ptr : [I + 1] int32
        Segments and entries of each item.
    segment_row, segment_start, segment_end : [S] int32
        KV ranges by batch row; `segment_end` is OPEN_END for a range that grows with its row.
    segment_span : [S] int32
        Run of the item's queries that attend to the range: ``begin | end << SPAN_SHIFT``; for
        items of the smallest tile shape, the number of partial results that the item merges.
    entry_query : [E] int32
        Batch row of each (item, query) pair.
    entry_slot : [E] int32
        Where the pair's partial result goes; DIRECT if the item is its query's whole attention;
        ``MERGES - slot`` if it merges the results from `slot` on into the output, which the
        launches before its own have left there.
    reduce_query : [R] int32, reduce_ptr : [R + 1] int32
        Queries that stage 2 reduces, and their partial slots (contiguous for each query).
    """

    tile_ptr: npt.NDArray[np.int32]
    item_segment_ptr: npt.NDArray[np.int32]
    item_query_ptr: npt.NDArray[np.int32]
    segment_row: npt.NDArray[np.int32]
    segment_start: npt.NDArray[np.int32]
    segment_end: npt.NDArray[np.int32]
    segment_span: npt.NDArray[np.int32]
    entry_query: npt.NDArray[np.int32]
    entry_slot: npt.NDArray[np.int32]
    reduce_query: npt.NDArray[np.int32]
    reduce_ptr: npt.NDArray[np.int32]

    @property
    def num_items(self) -> int:
        return len(self.item_query_ptr) - 1

    def items_of(self, shape: int) -> tuple[int, int]:
        """First item of a tile shape, and the one after its last."""
        at = ITEM_ORDER.index(shape)
        return int(self.tile_ptr[at]), int(self.tile_ptr[at + 1])

    @property
    def num_partials(self) -> int:
        """Partial results that stage 1 writes for a later launch to merge, for each query head."""
        return int((self.entry_slot >= 0).sum())

    @property
    def num_open(self) -> int:
        """Ranges that grow with their rows: each is one token longer in the next step."""
        return int((self.segment_end == OPEN_END).sum())

    def loaded_tokens(self, seq_lens: npt.NDArray[np.integer]) -> int:
        """Tokens that the items load, all together, when the rows have these lengths: [B] int."""
        is_open = self.segment_end == OPEN_END
        end = np.where(is_open, seq_lens[self.segment_row], self.segment_end)
        return int((end - self.segment_start).sum(dtype=np.int64))

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """Every array by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}
