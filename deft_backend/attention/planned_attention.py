"""What every attention over a plan has: its arrays on the device, its batch, and the planners."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

from deft_backend.attention.checks import AttentionError, check_batch
from deft_backend.forest import PrefixForest, forest_from_page_tables, forest_of_blocks
from deft_backend.planner import (
    DevicePlan,
    Plan,
    PlanCapacity,
    PlanError,
    check_capacity,
    plan_forest,
)
from deft_backend.planner.on_device import DevicePlanner, new_counters
from deft_backend.policies import Policy, Target, check_served
from deft_backend.policies.target import Limits
from deft_backend.shapes import ONE_TOKEN, QueryBlocks

_AS_IT_IS = nullcontext()

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""A batch: the page table, the row of each request, and its tokens."""


def numbered(device: torch.device | str) -> torch.device:
    """The device; for CUDA without a number, the current one."""
    found = torch.device(device)
    if found == torch.device("cuda"):
        found = torch.device("cuda", torch.cuda.current_device())
    return found


def device_as_current(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the current device in the `with` block; free if it is, or is the CPU."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return _AS_IT_IS
    return torch.cuda.device(device)


@dataclass(frozen=True, eq=False)
class PlannedBatch:
    """The batch of the plan on the device."""

    requests: int = 0  # requests that the plan covers; 0 for an empty plan
    # Whether the plan was made from rows of a page table, which it keeps for each of its ranges.
    from_rows: bool = False
    blocks: QueryBlocks = ONE_TOKEN  # the query blocks of a request
    # None for a plan of the device planner, of which the CPU knows nothing: the plan's forest, with
    # a query for each query block, and the plan.
    forest: PrefixForest | None = None
    plan: Plan | None = None


class PlannedAttention(ABC):
    """What adapters need of an attention over a plan, whatever it computes.

    The plan's arrays lie at addresses that CUDA graphs can hold. `batch` is what they cover.
    """

    max_batch: int  # most requests of a batch
    query_tokens: int  # most query tokens of a request
    #: Whether plans of the device may leave out requests of length 0: by most policies, `run` then
    #: leaves their rows of `out` as they are. By default it writes zeros.
    skips_empty = False

    def __init__(
        self,
        policy: Policy,
        target: Target,
        capacity: PlanCapacity,
        device: torch.device,
        page_size: int,
        *,
        overlapped: bool,
        interpreted: bool,
    ) -> None:
        self.policy = policy
        self.capacity = capacity
        self.device = device
        self.page_size = page_size
        #: Whether Triton's interpreter runs the kernels, and the reference plans batches.
        self.interpreted = interpreted
        self.arrays = DevicePlan(capacity, device)
        self.batch = PlannedBatch()
        self._target = target
        self._overlapped = overlapped
        self._device_planner: DevicePlanner | None = None
        self._counters = new_counters(device)
        self._own_rows = torch.arange(capacity.max_batch, dtype=torch.int32, device=device)

    @property
    def target(self) -> Target:
        """The attention, the GPU and the costs that plans are made for."""
        return self._target

    def plan_batch(
        self,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        table_rows: torch.Tensor | None = None,
        query_tokens: int | None = None,
        on_device: bool | None = None,
    ) -> None:
        """Plan a batch from its page table, as servers do in every step.

        On a GPU the device planner does, by launches that a CUDA graph can hold. The CPU waits for
        nothing and does not learn the plan: `batch.plan` is None. On the CPU `plan` does. Each call
        adds to `counters`.

        Parameters
        ----------
        page_table : [rows, P] int32 or int64
            Page ids, on the attention's device. Rows with the same page at one position must hold
            the same keys and values up to there, in these pages or in copies of them.
        seq_lens : [B] int32 or int64
            Tokens of each request, its query tokens included; 0 for a padding request.
        table_rows : [B] int32 or int64, optional
            Row of the page table of each request; default: row ``b`` for request ``b``.
        query_tokens : int, optional
            Most query tokens of a request of this batch; default: 1, and of MLA those of the
            attention.
        on_device : bool, optional
            Whether the device planner plans; default: on a GPU. On the CPU, Triton's interpreter
            runs it.

        Raises
        ------
        AttentionError
            If shapes, dtypes or devices do not match, or the batch is larger than `max_batch`, or
            `query_tokens` is larger than the attention's.
        PolicyError
            If the device planner does not know the policy, or cannot fill the `capacity`.
        ForestError
            On the CPU, if a request has more pages than the page table has columns.
        """
        blocks = self._blocks_of(query_tokens)
        self._check_size(len(seq_lens), blocks)
        if table_rows is None:
            table_rows = self._first_rows(page_table, len(seq_lens))
        check_batch(page_table, seq_lens, table_rows, self.device)
        on_device = not self.interpreted if on_device is None else on_device
        self._plan_rows((page_table, table_rows, seq_lens), blocks, on_device=on_device)

    @abstractmethod
    def _blocks_of(self, query_tokens: int | None) -> QueryBlocks:
        """The query blocks of such requests; AttentionError if the attention has no room."""

    @abstractmethod
    def _plan_rows(self, rows: Rows, blocks: QueryBlocks, *, on_device: bool) -> None:
        """Plan a batch with the device planner, or with the reference."""

    @property
    def counters(self) -> torch.Tensor:
        """[4] int64 in CPU memory: counts of the plans of `plan_batch`.

        They only grow: plans; tokens of context in them, which decoding query by query reads;
        tokens that their items load; nanoseconds of planning. The device writes them some time
        after each plan. Raises PolicyError if no server can run the policy, or the device planner
        cannot plan for this attention. So adapters ask for the counters at start.
        """
        if self.interpreted:
            check_served(self.policy)
        else:
            _ = self.device_planner
        return self._counters

    @property
    def device_planner(self) -> DevicePlanner:
        """The planner behind `plan_batch`; the first use allocates its memory.

        Raises PolicyError as the planner does.
        """
        if self._device_planner is None:
            check_served(self.policy)
            self._device_planner = DevicePlanner(
                self._target,
                self.policy,
                self.arrays,
                self.device,
                self.page_size,
                overlapped=self._overlapped,
                interpreted=self.interpreted,
                counters=self._counters,
            )
        return self._device_planner

    def clear_plan(self) -> None:
        """Empty the plan on the device: kernels then return at once for any batch."""
        with device_as_current(self.device):
            self.arrays.clear()
        self.batch = replace(self.batch, requests=0)

    def _plan_bytes(self) -> int:
        """Bytes of device memory: the arrays, and the device planner's memory if it is used."""
        planner = self._device_planner.num_bytes if self._device_planner is not None else 0
        return self.arrays.num_bytes + planner

    def _check_size(self, requests: int, blocks: QueryBlocks) -> None:
        if requests * blocks.blocks > self.capacity.max_batch:
            raise AttentionError(
                f"the batch holds {requests} requests; the plan was sized for "
                f"{self.capacity.max_batch // blocks.blocks}: raise max_batch"
            )

    def _first_rows(self, page_table: torch.Tensor, requests: int) -> torch.Tensor:
        """[requests] int32: row ``r`` of the page table for request ``r``."""
        if requests > min(len(page_table), len(self._own_rows)):
            raise AttentionError(
                f"{requests} requests, a page table of {len(page_table)} rows and max_batch "
                f"{len(self._own_rows)}; expected a row each, or table_rows, and a larger max_batch"
            )
        return self._own_rows[:requests]

    def _plan_forest(
        self,
        forest: PrefixForest,
        blocks: QueryBlocks,
        target: Target,
        policy: Policy | None = None,
    ) -> Plan:
        """Replace the plan by the reference's, of a forest with a query for each request.

        `target` is that of requests with these `blocks`. A `policy` replaces the usual one once.
        """
        forest = forest_of_blocks(forest, blocks.blocks, blocks.private_tokens)
        plan, _ = plan_forest(forest, policy or self.policy, target, self.capacity)
        self._use(plan, forest, blocks)
        return plan

    def _launch_plan(
        self, rows: Rows, blocks: QueryBlocks, target: Target, limits: Limits | None = None
    ) -> None:
        """Replace the plan by the device planner's, or by an empty one for an empty batch."""
        planner, requests = self.device_planner, len(rows[2])
        # A failed launch leaves the arrays half written, so they belong to no batch.
        self.batch = PlannedBatch()
        with device_as_current(self.device):
            if requests:
                planner.plan(
                    *rows,
                    target=target,
                    private_tokens=blocks.private_tokens,
                    limits=limits,
                    skips_empty=self.skips_empty,
                )
            else:
                self.arrays.clear()
        self.batch = PlannedBatch(requests=requests, from_rows=True, blocks=blocks)

    def _plan_by_reference(self, rows: Rows, plan: Callable[[PrefixForest], Plan]) -> None:
        """Replace the plan by the reference's for these rows of a page table; count it.

        `plan` makes the plan of a forest current.
        """
        began = time.perf_counter_ns()
        page_table, table_rows, seq_lens = rows
        lens = seq_lens.numpy()
        columns = -(-int(lens.max(initial=0)) // self.page_size)
        table = page_table.numpy()[:, :columns][table_rows.numpy()]
        # Page tables of hosts need no check. vLLM keeps both copies of a page computed twice, and
        # later requests may hold either; equal page ids still mean equal tokens before them.
        found = plan(forest_from_page_tables(table, lens, self.page_size, check=False))
        requests = torch.from_numpy(found.segment_request)
        self.arrays["segment_table"][: len(requests)] = table_rows[requests]
        self.batch = replace(self.batch, from_rows=True)
        counts = (1, int(lens.sum()), found.loaded_tokens(lens), time.perf_counter_ns() - began)
        if len(lens):  # as the device planner, which has nothing to launch
            self._counters += torch.tensor(counts)

    def _use(self, plan: Plan, forest: PrefixForest, blocks: QueryBlocks) -> None:
        """Replace the plan by one of `forest`, which has a query for each query block.

        Raises PlanError if the arrays cannot hold the plan, or it needs the masked tile and the
        policy does not: captured CUDA graphs have no launch for it.
        """
        if forest.batch_size > self.capacity.max_batch:
            raise PlanError(
                f"the plan is for {forest.batch_size} queries; its arrays hold "
                f"{self.capacity.max_batch}: raise max_batch"
            )
        masked = int(plan.tile_ptr[-1] - plan.tile_ptr[-2])
        if masked and not self.policy.several_segments:
            raise PlanError(
                f"the plan has {masked} items of several KV "
                f"ranges, which policy {self.policy.name} never makes; create TreeAttention with "
                "policy='deft-flatten'"
            )
        check_capacity(plan, self.capacity)
        with device_as_current(self.device):
            self.arrays.upload(plan)
        self.batch = PlannedBatch(
            forest.batch_size // blocks.blocks, blocks=blocks, forest=forest, plan=plan
        )

    def _rows_of_ranges(self, table_rows: torch.Tensor | None) -> torch.Tensor:
        """[segments] int32: the page table's row of each KV range of the plan.

        Plans from rows of a page table hold them. Others hold requests: `table_rows` [B] are their
        rows; None: row ``b`` for request ``b``.
        """
        if self.batch.from_rows:
            return self.arrays["segment_table"]
        requests = self.arrays["segment_request"]
        if table_rows is None or not len(table_rows):
            return requests
        # Behind the plan's ranges, an earlier plan may have left other requests.
        return table_rows[requests.clamp(max=len(table_rows) - 1)].int()
