"""The plan's fixed arrays on the device, and the copy of a new plan into them."""

from typing import Any, NamedTuple

import torch

from deft_backend.planner.encoding import ARRIVALS, ITEM_ORDER, READ_AHEAD
from deft_backend.planner.plan import Plan, PlanCapacity

_ALIGNMENT = 4  # numbers, of 16 bytes: the widest vector load of a kernel

Pointer = Any  # A tensor where a kernel is launched, a pointer to its first element in the kernel


class ItemArrays(NamedTuple):
    """The arrays of :class:`~deft_backend.planner.plan.Plan` that stage 1 reads, and `arrivals`."""

    tile_ptr: Pointer
    item_segment_ptr: Pointer
    item_query_ptr: Pointer
    segment_request: Pointer
    segment_start: Pointer
    segment_end: Pointer
    segment_span: Pointer
    entry_query: Pointer
    entry_slot: Pointer
    arrivals: Pointer
    """[ARRIVALS] int32: counters of programs (``hopper/large_tile_memory.py``). A plan sets them
    to 0, and so does stage 2 of each attention."""


class ReduceArrays(NamedTuple):
    """The arrays of :class:`~deft_backend.planner.plan.Plan` that stage 2 reads, and `arrivals`."""

    num_reduce: Pointer  # [1] int32: queries whose results stage 2 merges
    reduce_query: Pointer
    reduce_ptr: Pointer
    arrivals: Pointer


class DevicePlan:
    """Arrays of a plan at addresses that never change, so that CUDA graphs can hold them.

    All are int32 views of one buffer, the counts (`tile_ptr`, `num_reduce`) included, so a new plan
    needs one copy on the current stream. Only the device planner writes `segment_table`, the page
    table's row of each segment; the reference knows request indices only.
    """

    def __init__(self, capacity: PlanCapacity, device: torch.device) -> None:
        self.capacity = capacity
        items = max(capacity.max_items, READ_AHEAD)
        segments = max(capacity.max_segments, READ_AHEAD)
        sizes = {
            "tile_ptr": len(ITEM_ORDER) + 1,
            "num_reduce": 1,
            "item_segment_ptr": items + 1,
            "item_query_ptr": items + 1,
            "segment_table": segments,
            "segment_request": segments,
            "segment_start": segments,
            "segment_end": segments,
            "segment_span": segments,
            "entry_query": capacity.max_entries,
            "entry_slot": capacity.max_entries,
            "reduce_query": capacity.max_batch,
            "reduce_ptr": capacity.max_batch + 1,
            "arrivals": ARRIVALS,
        }
        self._places: dict[str, slice] = {}
        total = 0
        for name, count in sizes.items():
            self._places[name] = slice(total, total + count)
            total += -(-count // _ALIGNMENT) * _ALIGNMENT

        self._buffer = torch.zeros(total, dtype=torch.int32, device=device)
        self._views = self._views_of(self._buffer)
        #: The arrays that each stage reads, in the order of its structure's fields.
        self.stage1 = tuple(self._views[name] for name in ItemArrays._fields)
        self.stage2 = tuple(self._views[name] for name in ReduceArrays._fields)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._views[name]

    def arrays(self) -> torch.Tensor:
        """A copy of all arrays, one behind the other."""
        return self._buffer.clone()

    @property
    def num_bytes(self) -> int:
        return self._buffer.nbytes

    def upload(self, plan: Plan) -> None:
        """Replace the plan on the device, in the order of the current stream."""
        on_cpu = torch.zeros(self._buffer.shape, dtype=torch.int32)
        views = self._views_of(on_cpu)
        for name, array in plan.arrays().items():
            views[name].numpy()[: len(array)] = array
        views["num_reduce"].numpy()[0] = len(plan.reduce_query)
        self._buffer.copy_(on_cpu)

    def clear(self) -> None:
        """Make the plan empty, so that every kernel returns at once."""
        self._buffer.zero_()

    def _views_of(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: buffer[place] for name, place in self._places.items()}
