"""The device planner: its launches, in the order of its kernels, and its scratch memory."""

from __future__ import annotations

import logging
from typing import Any

import torch
import triton
from triton.runtime import driver

from deft_backend.compile import variants
from deft_backend.compile.triton_kernel import Kernel, Runner, addresses_of
from deft_backend.planner.device_plan import DevicePlan
from deft_backend.planner.on_device import (
    assign_edges,
    choose_ranges,
    flatten,
    measure_ranges,
    order_rows,
    price_chunks,
    write_flattened,
    write_plan,
)
from deft_backend.planner.on_device.arrays import Scratch, Tables, new_counters
from deft_backend.planner.on_device.launch_numbers import SIZES, Numbers, ProgramWork, largest_batch
from deft_backend.policies import DeftFlatten, FastTree, Invariant, Policy, PolicyError, Target
from deft_backend.policies.fasttree import EdgeCosts
from deft_backend.policies.measured_chunks import exposed_share
from deft_backend.policies.policy import ABSOLUTE, FLATTENED
from deft_backend.policies.target import Limits
from deft_backend.shapes import MAX_MERGED

logger = logging.getLogger(__name__)

COMPARE_ROWS = Kernel(order_rows, "compare_rows")
SORT_ROWS = Kernel(order_rows, "sort_rows")
FIND_NODES = Kernel(order_rows, "find_nodes")
CHOOSE_RANGES = Kernel(choose_ranges, "choose_ranges")
ASSIGN_EDGES = Kernel(assign_edges, "assign_edges")
PRICE_CHUNKS = Kernel(price_chunks, "price_chunks")
MEASURE_RANGES = Kernel(measure_ranges, "measure_ranges")
WRITE_PLAN = Kernel(write_plan, "write_plan")
FLATTEN_FOREST = Kernel(flatten, "flatten_forest")
FIND_GROUPS = Kernel(flatten, "find_groups")
CUT_GROUPS = Kernel(flatten, "cut_groups")
MEASURE_TILES = Kernel(write_flattened, "measure_tiles")
WRITE_FLATTENED = Kernel(write_flattened, "write_flattened")

_Rule = assign_edges.EdgeCosts | flatten.Rule | None
"""What the kernels of some rules of edges are compiled for."""

_Launches = list[tuple[Runner, tuple[Any, ...]]]

_MOST_REPEATED = 16  # batches whose launches a planner keeps: hosts take turns with few tensors

_NO_BOUNDS = ((1 << 31) - 1, (1 << 31) - 1)


class DevicePlanner:
    """Plans batches on the device, by the two rules of a policy.

    A plan takes seven launches, or six without a choice of chunks (`invariant`), or nine
    (`deft-flatten`). None waits for the CPU or depends on the contents of the page table. So a CUDA
    graph that holds them plans every batch that it is replayed for.

    - `target`: what plans are for, unless a plan has a target of its own.
    - `plan`: where plans go.
    - `overlapped`: whether each launch may begin before the one ahead of it has ended (programmatic
      dependent launch).
    - `interpreted`: whether Triton's interpreter runs the kernels; default: on the CPU.
    - `counters`: of :func:`new_counters`, written some time after each plan; default: its own.

    Raises PolicyError if the device planner does not know the policy's rules, the cost table was
    measured for other tile shapes, or the plan is larger than :func:`largest_batch` or too small
    for its batch.
    """

    def __init__(
        self,
        target: Target,
        policy: Policy,
        plan: DevicePlan,
        device: torch.device,
        page_size: int,
        *,
        overlapped: bool,
        interpreted: bool | None = None,
        counters: torch.Tensor | None = None,
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
        if policy.rules is None:
            raise PolicyError(
                f"the device planner does not know the policy {policy.name}; choose another one"
            )
        self._policy = policy
        self._rules = policy.rules
        self._target = target
        self._known: dict[int, tuple[Target, Numbers, _Rule]] = {}
        self._known_of(target)
        self._plan = plan
        self._page_size = page_size
        self._overlapped = overlapped
        self._interpreted = device.type == "cpu" if interpreted is None else interpreted
        self._fixed = (device, self._interpreted, page_size, overlapped, policy.rules)
        self._common = {
            "OVERLAPPED": overlapped,
            "TIMED": not self._interpreted,
            "PAGE_SIZE": page_size,
            "CHUNKS": policy.rules.chunks,
            "MAX_MERGED": MAX_MERGED,
            "WEIGHTS": price_chunks.Weights(),
        }
        size = self._size_for(capacity.max_batch)
        self.counters = new_counters(device) if counters is None else counters
        most_tiles = capacity.max_items if policy.rules.edges == FLATTENED else 0
        chunks = self._work(size).num_chunks()
        self._scratch = Scratch(size, chunks, most_tiles, self.counters, device)
        # The launches of plans by all that their arguments depend on; None: not kept.
        self._repeated: dict[tuple[Any, ...], _Launches | None] = {}
        self._kept: _Launches | None = None  # where `_launch` adds those of the current plan
        self._proven: set[tuple[Any, ...]] = set()  # kinds of plans whose trial has passed
        self._repeats = True

    @property
    def num_bytes(self) -> int:
        return self._scratch.num_bytes

    def plan(
        self,
        page_table: torch.Tensor,
        table_rows: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        target: Target | None = None,
        private_tokens: int = 0,
        limits: Limits | None = None,
        skips_empty: bool = False,
    ) -> None:
        """Launch the planning of a batch, on the current stream.

        - `page_table` [rows, P] int32 or int64: page ids; rows are contiguous.
        - `table_rows`, `seq_lens` [B] int: each request's row of the page table, and its tokens.
        - `target`: what the plan is for; default: the planner's target.
        - `private_tokens`: last tokens of each request that belong to no shared node.
        - `limits`: most items and entries; default: as many as the plan's arrays hold.
        - `skips_empty`: whether requests of length 0 may have no items; some policies give one.
        """
        _, numbers, rule = self._known_of(target or self._target)
        blocks, vectors = numbers.target.query_blocks, numbers.target.query_vectors
        batch, columns = len(seq_lens) * blocks, page_table.shape[1]
        size = self._size_for(batch)
        (small, large), work, scratch = numbers.tiles, self._work(size), self._scratch
        tables = Tables(page_table, table_rows, seq_lens)
        dtypes = (page_table.dtype, table_rows.dtype, seq_lens.dtype)
        knots = len(numbers.estimate[0])  # how many arguments some kernels have
        self._kind = (self._fixed, size, dtypes, blocks, vectors, knots, rule)
        pointers = addresses_of(tuple(tables))
        self._aligned = (pointers[0] | pointers[1] | pointers[2]) % 16 == 0
        shape = (batch, columns, page_table.stride(0), private_tokens)
        key = (self._kind, id(numbers), pointers, shape, limits, skips_empty)
        known = self._repeated.get(key) if self._may_repeat() else None
        if known is not None and self._kind in self._proven:
            self._repeat(known)
            return
        trial = None if known is None else self._try(known)
        planned_before = key in self._repeated
        if not planned_before and len(self._repeated) >= _MOST_REPEATED:
            self._repeated.clear()
        keep = planned_before and self._aligned and self._repeats
        self._kept = [] if keep else None
        self._constants: dict[str, Any] = {
            "BATCH": size,
            "BLOCKS": blocks,
            "CANDIDATES": work.candidates,
        }
        self._constants |= {"COSTS": rule, "RULE": rule}
        if self._rules.chunks == ABSOLUTE:
            self._check_room(batch, columns)
            shape = (*shape[:3], max(private_tokens, 1))  # a request's last chunk is its own
        began, cut, below = scratch.counters[-1], scratch.nodes[0], scratch.nodes[-1]

        row_tiles = -(-batch // (2 * work.rows))
        grid = (2 * row_tiles + 1, row_tiles)
        arguments: tuple[Any, ...] = (tuple(tables), scratch.ranks, scratch.guess, began, *shape)
        self._launch(COMPARE_ROWS, work.warps.compare_rows, grid, arguments, TILE=work.rows)
        programs, chunk_tokens = -(-batch // work.sorted), self._rules.chunk_tokens
        arguments = (arguments[0], scratch.ranks, scratch.order, cut, below, *shape, chunk_tokens)
        self._launch(SORT_ROWS, work.warps.sort_rows, programs, arguments, BLOCK=work.sorted)
        programs = -(-batch // work.nodes)
        arguments = (scratch.first, scratch.nodes, scratch.ranks, batch, small, large)
        self._launch(FIND_NODES, work.warps.find_nodes, programs, arguments, BLOCK=work.nodes)
        room = self._plan.capacity.room(self._policy, batch, numbers.target)
        skips = skips_empty and self._rules.edges != FLATTENED and self._rules.chunks != ABSOLUTE
        self._plan_ranges(numbers, tables, work, limits or room.limits, int(skips))
        self._repeated[key], self._kept = self._kept, None
        if trial is not None:
            self._judge(trial)

    def _may_repeat(self) -> bool:
        """Whether a batch of the current kind may be planned by the launches of an earlier plan.

        Steps without a CUDA graph plan the same tensors many times, so the second plan keeps its
        launches. The first repeat of each kind of plan is a trial: a full plan follows it, and
        counts. A difference ends all repeats.
        """
        if not self._repeats or variants.recorder is not None:
            return False
        if self._kind in self._proven or self._fixed[0].type != "cuda":
            return True
        # Within a capture, the CPU could not compare.
        return not torch.cuda.is_current_stream_capturing()

    def _repeat(self, launches: _Launches) -> None:
        """Launch again what planned the same tensors before, at a fraction of the CPU's time."""
        stream = driver.active.get_current_stream(driver.active.get_current_device())
        for runner, arguments in launches:
            runner(*arguments, stream=stream)

    @torch.inference_mode()  # the arrays may be tensors of inference mode, and its caller may not
    def _try(self, launches: _Launches) -> torch.Tensor:
        """The plan's arrays by repeated launches, which nothing counts.

        They begin with no plan and empty memory. Otherwise the plan before could hide a launch
        that writes nothing.
        """
        counted = self._scratch.counters[0]
        before = counted.clone()
        self._plan.clear()
        self._scratch.clear()
        self._repeat(launches)
        counted.copy_(before)
        return self._plan.arrays()

    def _judge(self, trial: torch.Tensor) -> None:
        """Compare a trial with the full plan that followed it."""
        if torch.equal(trial, self._plan.arrays()):
            self._proven.add(self._kind)
            return
        self._repeats = False
        logger.warning(
            "deft: repeated launches of a plan differ from a full plan; every eager step makes its "
            "own launches from now on, which takes CPU time"
        )

    def _plan_ranges(
        self, numbers: Numbers, tables: Tables, work: ProgramWork, limits: Limits, skips: int
    ) -> None:
        """Launch the kernels that do not read the page table."""
        target, scratch, warps = numbers.target, self._scratch, work.warps
        batch, block = len(tables.seq_lens) * target.query_blocks, target.block_tokens
        at_once, most = target.programs_for(batch)[:2], (limits.items, limits.entries)
        size = (batch, *numbers.tiles)
        # A few requests do not fill the GPU, so a token takes more of the whole GPU's time.
        busy = (max(1, min(at_once[0], batch)), at_once[1])
        per_item = [cost for costs in numbers.per_item for cost in costs]
        per_gpu = [c / n for costs, n in zip(numbers.per_item, busy, strict=True) for c in costs]
        per_gpu[0] *= exposed_share(busy[0], at_once[0])
        of_nodes = (scratch.first, scratch.nodes, scratch.ranges, scratch.chosen)
        forest = (scratch.order, tables.seq_lens, *of_nodes)
        arguments: tuple[Any, ...]
        if self._rules.edges == "greedy":
            arguments = (*forest, scratch.search, *size, *most, skips)
            self._launch(ASSIGN_EDGES, min(16, warps.choose_ranges), 1, arguments)
        else:
            flattened = self._rules.edges == FLATTENED
            edges, bounds = ("all", _NO_BOUNDS) if flattened else (self._rules.edges, most)
            arguments = (*forest, *size, *bounds, skips, (*per_gpu, numbers.partial_ns))
            self._launch(CHOOSE_RANGES, warps.choose_ranges, 1, arguments, EDGES=edges)
            if flattened:
                self._write_flattened(tables, batch, work, limits)
                return
        columns, ordered = work.leaf_columns, target.ordered_queries(batch)
        if self._rules.chunks == ABSOLUTE:
            block = self._rules.chunk_tokens
            columns = min(columns, 256)  # the places of chunks take registers
        else:
            times = ((*per_item, numbers.partial_ns), numbers.reduce_ns, float(target.transfer_ns))
            lengths = (block, self._rules.chunk_tokens, numbers.estimate)
            arguments = (scratch.ranges, scratch.candidates, *numbers.tiles, *most, *at_once)
            arguments = (*arguments, numbers.sms, *times, *lengths)
            self._launch(PRICE_CHUNKS, warps.price_chunks, (work.candidates, 2), arguments)
        programs, chosen = 2 * -(-batch // work.ranges), (scratch.chosen, scratch.candidates)
        arguments = (scratch.ranges, *chosen, scratch.places, scratch.results, *size)
        arguments = (*arguments, block, ordered, numbers.estimate)
        constants = {"BLOCK": work.ranges, "LEAVES": columns, "NODES": work.node_columns}
        self._launch(MEASURE_RANGES, warps.measure_ranges, programs, arguments, **constants)
        programs = 1 + -(-batch // work.leaves) + min(batch, work.node_programs)
        arguments = (tables.table_rows, self._plan["segment_table"], scratch.order, scratch.chosen)
        arguments = (*arguments, scratch.ranges, scratch.places, scratch.results)
        arguments = (*arguments, self._plan.stage1, self._plan.stage2, scratch.counters, *size)
        arguments = (*arguments, self._rules.chunk_tokens or block, ordered)
        constants = {"LEAVES": work.leaves, "WIDTH": work.width}
        self._launch(WRITE_PLAN, warps.write_plan, programs, arguments, **constants)

    def _write_flattened(
        self, tables: Tables, batch: int, work: ProgramWork, limits: Limits
    ) -> None:
        """Launch the kernels that cut the flattened forest into chunks."""
        plan, scratch, columns = self._plan, self._scratch, min(64, work.node_columns)
        by_query, by_group = -(-batch // work.ranges), -(-limits.items // work.ranges)
        by_group, by_tile = min(by_group, work.tile_programs), min(limits.items, work.tile_programs)
        arguments: tuple[Any, ...] = (scratch.flat, batch, *limits)
        candidates, size = self._constants["RULE"].doublings + 1, self._constants["BATCH"]
        programs = candidates + 2 * size // work.nodes
        self._launch(FLATTEN_FOREST, work.warps.find_nodes, programs, arguments, BLOCK=work.nodes)
        blocks = {"BLOCK": work.ranges, "COLUMNS": work.node_columns}
        arguments = (scratch.flat, batch)
        self._launch(FIND_GROUPS, 4, by_group, arguments, **blocks)
        self._launch(CUT_GROUPS, 4, by_tile, arguments, BLOCK=16, COLUMNS=columns)
        self._launch(MEASURE_TILES, 4, by_query + by_group, arguments, **blocks)
        arguments = (scratch.flat, tables.table_rows, plan["segment_table"])
        arguments = (*arguments, plan.stage1, plan.stage2, scratch.counters, batch)
        self._launch(WRITE_FLATTENED, 8, 1 + by_query + by_tile, arguments, **blocks)

    def _check_room(self, batch: int, columns: int) -> None:
        """Raise PolicyError unless the plan holds every chunk of such a batch."""
        assert isinstance(self._policy, Invariant)
        tokens = columns * self._page_size
        results = batch * self._policy.most_chunks(tokens)
        capacity = self._plan.capacity
        held = min(capacity.max_items, capacity.max_entries)
        if results > held:
            raise PolicyError(
                f"a page table for {tokens} tokens and a batch of {batch} need {results} partial "
                f"results with policy {self._policy.name}; the plan holds {held}: raise "
                "max_tokens or max_batch"
            )

    def _known_of(self, target: Target) -> tuple[Target, Numbers, _Rule]:
        """Computed once for each target. Each step asks, and comparing targets takes time."""
        found = self._known.get(id(target))
        if found is None:
            rule: _Rule = None
            if isinstance(self._policy, DeftFlatten):
                rule = flatten.Rule.of(self._policy, target)
            elif isinstance(self._policy, FastTree):
                # FastTree's equations for the two tiles of one range
                costs = EdgeCosts.of(self._policy.coefficients or target.costs.fasttree, target)
                (small, large), (few, many) = costs.tile_heights, costs.tile_tokens
                rule = assign_edges.EdgeCosts(*costs[:4], small, few, large, many)
            found = self._known[id(target)] = (target, Numbers(target), rule)
        return found

    def _launch(
        self,
        kernel: Kernel,
        num_warps: int,
        programs: int | tuple[int, ...],
        arguments: tuple[Any, ...],
        **constants: Any,
    ) -> None:
        """Launch a kernel; `constants` are those that differ between kernels."""
        constants = {**self._common, **self._constants, **constants}
        follows = kernel is not COMPARE_ROWS
        options = {"num_warps": num_warps, "launch_pdl": follows and self._overlapped}
        if kernel is WRITE_PLAN and constants["BATCH"] == 1024:
            # Without a limit, the assembler of Triton 3.8 takes 48 registers and spills a pointer.
            options["maxnreg"] = 64
        chosen = {name: constants[name] for name in kernel.constants}
        kernel.launch(
            programs,
            arguments,
            chosen,
            variant=self._kind,
            aligned=self._aligned,
            interpreted=self._interpreted,
            **options,
        )
        if self._kept is not None:
            runner = kernel.runner(programs, variant=self._kind)
            if runner is None:  # all launches of a plan are repeated, or none
                self._kept = None
            else:
                self._kept.append((runner, (*addresses_of(arguments), *chosen.values())))

    def _work(self, size: int) -> ProgramWork:
        return (ProgramWork.interpreted if self._interpreted else ProgramWork.on_gpu)(size)

    def _size_for(self, batch: int) -> int:
        if self._interpreted:
            return max(8, int(triton.next_power_of_2(batch)))
        return next(size for size in SIZES if size >= batch)
