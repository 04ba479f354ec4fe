"""Plan: a grouping cut into the kernels' work items, in arrays of fixed capacity on the device."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

TILE_ROWS = (16, 32, 64, 128)
"""Rows of the query tiles that stage 1 is compiled for (FastTree's multi-phase tiling)."""

DIRECT = -1
"""Partial slot of an item that is its query's whole attention: it writes the output itself."""

OPEN_END = -1
"""End of a segment that stops where its row's sequence currently ends."""


@dataclass(frozen=True)
class PlanCapacity:
    """Sizes of a plan's arrays. They follow from the largest batch and the SM count alone.

    Attributes
    ----------
    max_batch : int
        Requests.
    max_items : int
        Work items (KV range × query tile).
    max_entries : int
        (item, query) pairs; also the partial results that the workspace holds.
    max_segments : int
        KV ranges; more than items only under bit causal masks.
    max_mask_words : int
        64-bit words of bit causal masks.
    """

    max_batch: int
    max_items: int
    max_entries: int
    max_segments: int
    max_mask_words: int

    @classmethod
    def for_batch(cls, max_batch: int, num_programs: int = 132) -> PlanCapacity:
        """Room for every tree over `max_batch` requests, each KV range split for `num_programs`.

        A forest over B queries has at most 2B - 1 nodes. Splitting long nodes adds at most a few
        items a program; every query takes part in 16 items on average (a policy that wants more
        is coarsened by the planner until it fits).
        """
        items = 4 * max_batch + 8 * num_programs
        entries = 16 * max_batch + 8 * num_programs
        return cls(
            max_batch=max_batch,
            max_items=items,
            max_entries=entries,
            max_segments=items + 2 * max_batch,
            max_mask_words=2 * (items + 2 * max_batch),
        )

    def workspace_bytes(self, num_query_heads: int, head_dim: int) -> int:
        """Bytes of float32 partial outputs and log-sum-exps."""
        return self.max_entries * num_query_heads * (head_dim + 1) * 4


@dataclass(frozen=True, eq=False)
class Plan:
    """Stage 1's items and stage 2's reduction, as host arrays cut to their counts.

    Attributes
    ----------
    tile_ptr : [len(TILE_ROWS) + 1] int32
        Items of each tile shape, in launch order (longest first within a shape).
    item_segment_ptr : [I + 1] int32, item_query_ptr : [I + 1] int32
        Segments and entries of each item.
    segment_row, segment_start, segment_end : [S] int32
        KV ranges by batch row; `segment_end` is OPEN_END for a range that grows with its row.
    segment_mask : [S] int32
        First word of the segment's bit causal mask in `mask_words`, or -1: every query attends.
    mask_words : [W] uint64
        Masks over the item's queries, lowest bit first.
    entry_query : [E] int32
        Batch row of each (item, query) pair.
    entry_slot : [E] int32
        Where the pair's partial result goes, or DIRECT.
    reduce_query : [R] int32, reduce_ptr : [R + 1] int32
        Queries that stage 2 reduces, and their partial slots (contiguous for each query).
    """

    tile_ptr: npt.NDArray[np.int32]
    item_segment_ptr: npt.NDArray[np.int32]
    item_query_ptr: npt.NDArray[np.int32]
    segment_row: npt.NDArray[np.int32]
    segment_start: npt.NDArray[np.int32]
    segment_end: npt.NDArray[np.int32]
    segment_mask: npt.NDArray[np.int32]
    mask_words: npt.NDArray[np.uint64]
    entry_query: npt.NDArray[np.int32]
    entry_slot: npt.NDArray[np.int32]
    reduce_query: npt.NDArray[np.int32]
    reduce_ptr: npt.NDArray[np.int32]

    @property
    def num_items(self) -> int:
        return len(self.item_query_ptr) - 1

    @property
    def num_partials(self) -> int:
        """Partial results that stage 1 writes and stage 2 reads, for each query head."""
        return int(self.reduce_ptr[-1])

    @property
    def masked(self) -> bool:
        """Whether any item needs a bit causal mask or more than one segment."""
        return len(self.segment_row) > self.num_items or len(self.mask_words) > 0

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """Every array by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}
