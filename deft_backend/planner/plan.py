"""Plan: work items, the merges of their results, and the capacity of its arrays."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from deft_backend.planner.encoding import ITEM_ORDER, OPEN_END
from deft_backend.policies import Policy, Target
from deft_backend.policies.target import Limits

WORKSPACE_LIMIT = 256 << 20  # most bytes of partial results in a plan's default capacity


@dataclass(frozen=True)
class PlanCapacity:
    """Sizes of a plan's arrays; they depend on the largest batch and the GPU, not on contexts."""

    max_batch: int  # queries: requests, or the query blocks of requests of many query tokens
    max_items: int  # work items (KV range × query tile)
    max_entries: int  # (item, query) pairs; also the partial results that the workspace holds
    max_segments: int  # segments; only masked tiles have several for each item

    @classmethod
    def for_batch(
        cls, max_batch: int, num_programs: int = 132, entry_bytes: int = 0
    ) -> PlanCapacity:
        """Room for every forest of `max_batch` requests, with KV ranges cut for `num_programs`.

        A forest over B queries has at most 2B - 1 nodes. Cutting long nodes adds a few items for
        each program. There is room for 12 entries for each query on average, or for fewer if the
        workspace would exceed WORKSPACE_LIMIT with partial results of `entry_bytes` bytes; policies
        make fewer groups then. Two entries for each query and one for each program always fit.
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

    @property
    def limits(self) -> Limits:
        return Limits(self.max_items, self.max_entries, self.max_segments)

    def room(self, policy: Policy, batch: int, target: Target) -> PlanCapacity:
        """What a plan of `batch` queries may take of these arrays.

        The rule ``fixed`` makes chunks longer until they fit, and each chunk leaves a partial
        result of each query. So its plans take no more than arrays for just this batch would hold.
        """
        if policy.rules is None or policy.rules.chunks != "fixed":
            return self
        most = PlanCapacity.for_batch(batch, max(target.tile_programs))
        return PlanCapacity(self.max_batch, *map(min, self.limits, most.limits))


@dataclass(frozen=True, eq=False)
class Plan:
    """Stage 1's items and stage 2's merges, as NumPy arrays cut to their counts.

    :mod:`deft_backend.planner.encoding` defines the values that these arrays hold.
    """

    # [len(ITEM_ORDER) + 1] int32: items of shape ``ITEM_ORDER[p]`` are those from ``tile_ptr[p]``
    # to ``tile_ptr[p + 1]``, longest first.
    tile_ptr: npt.NDArray[np.int32]
    item_segment_ptr: npt.NDArray[np.int32]  # [I + 1] int32: segments and entries of each item
    item_query_ptr: npt.NDArray[np.int32]
    # [S] int32: KV ranges of requests; `segment_end` is OPEN_END for a range that grows with its
    # request.
    segment_request: npt.NDArray[np.int32]
    segment_start: npt.NDArray[np.int32]
    segment_end: npt.NDArray[np.int32]
    # [S] int32: the span: ``begin | end << SPAN_SHIFT`` of the item's queries that attend to the
    # range. For items of the small tile instead the number of partial results that the item merges.
    segment_span: npt.NDArray[np.int32]
    # [E] int32: query of each entry: the request index, or ``request index * blocks + block`` if
    # requests have several query blocks.
    entry_query: npt.NDArray[np.int32]
    # [E] int32: slot of the entry's partial result. DIRECT if the item is its query's whole
    # attention. ``MERGES - slot`` if the item itself writes the output. It first merges the results
    # from `slot` on, which earlier launches have written, and then writes the output.
    entry_slot: npt.NDArray[np.int32]
    # [R] int32: queries whose results stage 2 merges, and their slots (contiguous for each query).
    reduce_query: npt.NDArray[np.int32]
    reduce_ptr: npt.NDArray[np.int32]

    @property
    def num_items(self) -> int:
        return len(self.item_query_ptr) - 1

    def items_of(self, shape: int) -> tuple[int, int]:
        """First item of a tile shape, and the item after its last."""
        at = ITEM_ORDER.index(shape)
        return int(self.tile_ptr[at]), int(self.tile_ptr[at + 1])

    @property
    def num_partials(self) -> int:
        """Partial results for each query head that a later launch must merge."""
        return int((self.entry_slot >= 0).sum())

    def range_tokens(self, seq_lens: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
        """[S] tokens of each KV range if the requests have these lengths: [B] int."""
        is_open = self.segment_end == OPEN_END
        end = np.where(is_open, seq_lens[self.segment_request], self.segment_end)
        return (end - self.segment_start).astype(np.int64)

    def loaded_tokens(self, seq_lens: npt.NDArray[np.integer]) -> int:
        """Tokens that all items load if the requests have these lengths: [B] int."""
        return int(self.range_tokens(seq_lens).sum())

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        return {f.name: getattr(self, f.name) for f in fields(self)}
