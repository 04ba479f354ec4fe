"""The device planner's launches and scratch memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton

from deft_backend.compile.triton_kernel import Kernel
from deft_backend.kernel_limits import MAX_MERGED
from deft_backend.planner.device_plan import DevicePlan
from deft_backend.planner.on_device import (
    choose_ranges,
    compare_rows,
    find_nodes,
    measure_ranges,
    price_chunks,
    sort_rows,
    write_plan,
)
from deft_backend.planner.on_device.arrays import Scratch
from deft_backend.policies import PolicyError, Target
from deft_backend.policies.chunk_choice import ALONE, EXPOSED, HIDDEN, PIECES, UNEVEN
from deft_backend.policies.makespan import kv_bytes

COMPARE_ROWS = Kernel(compare_rows, "compare_rows")
SORT_ROWS = Kernel(sort_rows, "sort_rows")
FIND_NODES = Kernel(find_nodes, "find_nodes")
CHOOSE_RANGES = Kernel(choose_ranges, "choose_ranges")
PRICE_CHUNKS = Kernel(price_chunks, "price_chunks")
MEASURE_RANGES = Kernel(measure_ranges, "measure_ranges")
WRITE_PLAN = Kernel(write_plan, "write_plan")

SIZES = (64, 256, 1024, 2048)
"""Batches that the kernels are compiled for; a smaller batch leaves lanes idle."""

MOST_ELEMENTS = 1 << 20
"""Most elements of a Triton tensor."""


@dataclass(frozen=True)
class Blocks:
    """How much work one program of each kernel has.

    Attributes
    ----------
    rows : int
        Requests that one program of ``compare_rows`` compares with all others.
    places : int
        Requests or ranges that one program of the other kernels compares with all others.
    leaves : int
        Requests whose leaves one program writes.
    candidates : int
        Chunk lengths that are priced for each tile shape; a power of two.
    """

    rows: int
    places: int
    leaves: int
    candidates: int

    @classmethod
    def on_gpu(cls, size: int) -> Blocks:
        """As much work for each program as its registers hold."""
        many = size > 1024
        return cls(rows=2 if many else 4, places=4 if many else 8, leaves=32, candidates=64)

    @classmethod
    def interpreted(cls, size: int) -> Blocks:
        """Few programs: the interpreter's time is Python's, for each program and operation."""
        many = min(size, MOST_ELEMENTS // (2 * size))  # each is compared with all ranges
        return cls(rows=many, places=many, leaves=size, candidates=4)

    def pieces(self) -> list[int]:
        """[candidates] of PIECES, the last repeated."""
        every = max(1, len(PIECES) // self.candidates)
        found = PIECES[::every][: self.candidates]
        return [*found, *[found[-1]] * (self.candidates - len(found))]


def largest_batch() -> int:
    """Requests that a plan made on the device may hold."""
    return SIZES[-1]


@dataclass(frozen=True)
class Numbers:
    """What the kernels take from a target."""

    tiles: tuple[int, int]
    """Queries that the small tile and the large tile serve."""
    programs: tuple[int, int]
    item_ns: tuple[float, ...]
    token_ns: tuple[float, ...]
    partial_ns: float
    reduce_ns: float
    """Expected times; see :class:`~deft_backend.costs.tile_costs.TileCosts`."""
    sms: float
    """SMs for each KV head."""
    transfer_ns: float
    """Time in which the memory delivers one token of all KV heads."""
    block: int
    """Tokens of a KV block."""
    query_blocks: int

    @classmethod
    def of(cls, target: Target) -> Numbers:
        """The numbers of a target.

        Raises
        ------
        PolicyError
            If the cost table was measured for other tile shapes.
        """
        model = target.costs
        tiles = target.single_range_tiles
        if len(tiles) != 2 or len(model.tiles.item_ns) != 2:
            raise PolicyError(
                f"{len(tiles)} tile shapes for one KV range and costs of "
                f"{len(model.tiles.item_ns)}; expected 2 of both: measure this version's kernels "
                "with `deft tune`"
            )
        return cls(
            tiles=(tiles[0], tiles[1]),
            programs=(target.tile_programs[0], target.tile_programs[1]),
            item_ns=model.tiles.item_ns,
            token_ns=model.tiles.token_ns,
            partial_ns=target.partial_ns,
            reduce_ns=model.tiles.reduce_ns,
            sms=target.num_sms / target.num_kv_heads,
            transfer_ns=model.transfer_ms(kv_bytes(1, target)) * 1e6,
            block=target.block_tokens,
            query_blocks=target.query_blocks,
        )


class DevicePlanner:
    """Plans batches on the device, by the policy `auto`.

    A plan takes seven launches. None waits for the host, and none depends on the contents of the
    page table. So a CUDA graph that holds them plans every batch that it is replayed for.

    Parameters
    ----------
    target : Target
        What plans are for, unless a plan has a target of its own; its cost table holds the
        measured costs.
    plan : DevicePlan
        Where plans go.
    device : torch.device
    page_size : int
        Tokens a page.
    overlapped : bool
        Whether each launch may begin before the one ahead of it has ended (programmatic dependent
        launch).
    interpreted : bool, optional
        Whether Triton's interpreter runs the kernels; default: on the CPU.

    Attributes
    ----------
    counters : [4] int64, in host memory
        Plans; tokens of context in them, which decoding query by query reads; tokens that their
        items load; nanoseconds of planning, by the GPU's clock (0 on the CPU). The device writes
        them, some time after each plan.

    Raises
    ------
    PolicyError
        If the cost table was measured for other tile shapes. If the plan is larger than
        :func:`largest_batch`, or too small for its batch.
    """

    def __init__(
        self,
        target: Target,
        plan: DevicePlan,
        device: torch.device,
        page_size: int,
        *,
        overlapped: bool,
        interpreted: bool | None = None,
    ) -> None:
        capacity = plan.capacity
        if capacity.max_batch > largest_batch():
            raise PolicyError(
                f"max_batch is {capacity.max_batch}; plans made on the device hold at most "
                f"{largest_batch()} requests"
            )
        if (
            min(capacity.max_items, capacity.max_entries) < capacity.max_batch
            or capacity.max_segments < capacity.max_items
        ):
            raise PolicyError(
                f"{capacity}; plans made on the device need an item, an entry and a KV range for "
                "each request, and a KV range for each item"
            )
        self._target = target
        self._numbers = {id(target): (target, Numbers.of(target))}
        self._plan = plan
        self._device = device
        self._page_size = page_size
        self._overlapped = overlapped
        self._interpreted = device.type == "cpu" if interpreted is None else interpreted
        size = self._size_for(capacity.max_batch)
        self.counters = torch.zeros(4, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._scratch = Scratch.allocate(size, self._blocks(size).pieces(), self.counters, device)

    @property
    def num_bytes(self) -> int:
        """Bytes of the planner's own arrays on the device."""
        return self._scratch.num_bytes

    def plan(
        self,
        page_table: torch.Tensor,
        table_rows: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        target: Target | None = None,
        private_tokens: int = 0,
    ) -> None:
        """Launch the planning of a batch, on the current stream.

        Parameters
        ----------
        page_table : [rows, P] int32 or int64
            Page ids; rows are contiguous.
        table_rows : [B] int
            Row of the page table of each request.
        seq_lens : [B] int
            Tokens of each request.
        target : Target, optional
            What the plan is for; default: the planner's target.
        private_tokens : int
            Last tokens of each request that belong to no shared node.
        """
        numbers = self._numbers_of(target or self._target)
        batch, columns = len(seq_lens) * numbers.query_blocks, page_table.shape[1]
        size = self._size_for(batch)
        small, large = numbers.tiles
        scratch = self._scratch
        began, cut, below = scratch.counters[-1], scratch.nodes[0], scratch.nodes[-1]
        table = (page_table, table_rows, seq_lens)
        kind = (
            size, self._device, page_table.dtype, table_rows.dtype, seq_lens.dtype,
            self._page_size, self._overlapped, numbers.query_blocks,
        )  # fmt: skip
        pointers = 0
        for tensor in table:
            pointers |= tensor.data_ptr()
        self._kind, self._aligned = kind, pointers % 16 == 0
        common: dict[str, Any] = {
            "BATCH": size, "OVERLAPPED": self._overlapped, "TIMED": not self._interpreted,
        }  # fmt: skip
        common["BLOCKS"] = numbers.query_blocks
        paged = {"PAGE_SIZE": self._page_size}
        shape = (batch, columns, page_table.stride(0), private_tokens)
        blocks = self._blocks(size)
        rows, places = -(-batch // blocks.rows), -(-batch // blocks.places)

        self._launch(
            COMPARE_ROWS, (rows,),
            (table, scratch.ranks, scratch.guess, began, *shape),
            {**common, **paged, "BLOCK": blocks.rows},
            follows=False,
        )  # fmt: skip
        self._launch(
            SORT_ROWS, (places,),
            (table, scratch.ranks, scratch.order, cut, below, *shape),
            {**common, **paged, "BLOCK": blocks.places},
        )  # fmt: skip
        self._launch(
            FIND_NODES, (places,),
            (scratch.first, scratch.nodes, batch, small, large),
            {**common, "BLOCK": blocks.places},
        )  # fmt: skip
        self._plan_ranges(numbers, batch, table_rows, seq_lens, blocks, common)

    def _plan_ranges(
        self,
        numbers: Numbers,
        batch: int,
        table_rows: torch.Tensor,
        seq_lens: torch.Tensor,
        blocks: Blocks,
        common: dict[str, Any],
    ) -> None:
        """Launch the kernels that do not read the page table."""
        small, large = numbers.tiles
        programs = numbers.programs
        scratch = self._scratch
        capacity = self._plan.capacity
        partial_ns = float(numbers.partial_ns)
        limits = (capacity.max_entries, capacity.max_items)
        # A few requests do not fill the GPU, so a token takes more of the whole GPU's time.
        busy = (max(1, min(programs[0], batch)), programs[1])
        per_gpu = [
            cost / count
            for shape, count in enumerate(busy)
            for cost in (numbers.item_ns[shape], numbers.token_ns[shape])
        ]
        per_item = [
            float(cost)
            for shape in range(2)
            for cost in (numbers.item_ns[shape], numbers.token_ns[shape])
        ]
        priced = {
            "CANDIDATES": blocks.candidates, "MAX_MERGED": MAX_MERGED,
            "WEIGHTS": price_chunks.Weights(ALONE, HIDDEN, EXPOSED, UNEVEN, MAX_MERGED),
        }  # fmt: skip
        self._launch(
            CHOOSE_RANGES, (1,),
            (
                scratch.order, seq_lens, scratch.nodes, scratch.ranges, batch, small, large,
                *limits, (*per_gpu, partial_ns),
            ),
            common,
        )  # fmt: skip
        self._launch(
            PRICE_CHUNKS, (blocks.candidates, 2),
            (
                scratch.ranges, scratch.candidates, small, large, *limits, *programs,
                numbers.sms, (*per_item, partial_ns), float(numbers.reduce_ns),
                float(numbers.transfer_ns), numbers.block,
            ),
            {**common, **priced},
        )  # fmt: skip
        self._launch(
            MEASURE_RANGES, (2 * common["BATCH"] // blocks.places,),
            (
                scratch.first, scratch.ranges, scratch.candidates, scratch.places,
                scratch.results, small, large,
            ),
            {**common, **priced, "BLOCK": blocks.places},
        )  # fmt: skip
        self._launch(
            WRITE_PLAN, (-(-batch // blocks.leaves) + batch,),
            (
                table_rows, self._plan["segment_table"], scratch.order, scratch.first,
                scratch.ranges, scratch.places, scratch.results, self._plan.stage1,
                self._plan.stage2, scratch.counters, batch, small, large, numbers.block,
            ),
            {**common, "LEAVES": blocks.leaves, "WIDTH": 256},
        )  # fmt: skip

    def _launch(
        self,
        kernel: Kernel,
        grid: tuple[int, ...],
        arguments: tuple[Any, ...],
        constants: dict[str, Any],
        *,
        follows: bool = True,
    ) -> None:
        num_warps = 8 if constants["BATCH"] > 256 else 4
        limits = {}
        if kernel is WRITE_PLAN and constants["BATCH"] == 1024:
            # Without a limit, the assembler of Triton 3.8 takes 48 registers and spills a pointer.
            limits["maxnreg"] = 64
        kernel.launch(
            grid, arguments, {name: constants[name] for name in kernel.constants},
            variant=self._kind, aligned=self._aligned, interpreted=self._interpreted,
            num_warps=num_warps, launch_pdl=follows and self._overlapped, **limits,
        )  # fmt: skip

    def _numbers_of(self, target: Target) -> Numbers:
        """Computed once for each target. Each step asks, and comparing targets takes time."""
        found = self._numbers.get(id(target))
        if found is None:
            found = self._numbers[id(target)] = (target, Numbers.of(target))
        return found[1]

    def _blocks(self, size: int) -> Blocks:
        return (Blocks.interpreted if self._interpreted else Blocks.on_gpu)(size)

    def _size_for(self, batch: int) -> int:
        """Size of batch that the kernels are compiled for."""
        if self._interpreted:
            return max(8, int(triton.next_power_of_2(batch)))
        return next(size for size in SIZES if size >= batch)
