"""The plan that the kernels follow: its arrays on the device, its batch, and its replacement."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from deft_backend.attention.current_device import device_as_current
from deft_backend.forest import PrefixForest, forest_of_blocks
from deft_backend.planner import (
    DevicePlan,
    Plan,
    PlanCapacity,
    PlanError,
    check_capacity,
    plan_forest,
)
from deft_backend.planner.on_device import DevicePlanner
from deft_backend.policies import Grouping, Policy, Target
from deft_backend.shapes.query_blocks import ONE_TOKEN, QueryBlocks


@dataclass(frozen=True, eq=False)
class PlannedBatch:
    """The batch of the plan on the device."""

    requests: int = 0  # requests that the plan covers; 0 for an empty plan
    # Whether the device planner made the plan. If so, the CPU knows nothing else of it.
    on_device: bool = False
    blocks: QueryBlocks = ONE_TOKEN  # the query blocks of a request
    # Of the host planner's plan: its forest, with a query for each query block, the plan, and the
    # groups behind it; no groups if the plan was made elsewhere.
    forest: PrefixForest | None = None
    plan: Plan | None = None
    grouping: Grouping | None = None


class PlanHolder:
    """What every attention over a plan offers for its plan."""

    _current: CurrentPlan

    @property
    def forest(self) -> PrefixForest | None:
        """The forest of the plan, with a query for each query block; None for a plan made on the
        device."""
        return self._current.batch.forest

    @property
    def last_plan(self) -> Plan | None:
        """The host planner's plan; None for a plan made on the device."""
        return self._current.batch.plan

    @property
    def planned_on_device(self) -> bool:
        """Whether the device planner made the plan."""
        return self._current.batch.on_device

    @property
    def device_planner(self) -> DevicePlanner:
        """The planner behind `plan_on_device`; the first use allocates its memory."""
        return self._current.device_planner

    def clear_plan(self) -> None:
        """Empty the plan on the device: kernels then return at once for any batch."""
        self._current.clear()

    def restore_plan(self) -> None:
        """Put the host planner's last plan back after :meth:`clear_plan`.

        Afterwards kernels of any stream see it.
        """
        self._current.restore()


class CurrentPlan:
    """A plan's arrays on the device and the planners that write them.

    `arrays` are the plan as the kernels read it, and `batch` is what they cover. The arrays keep
    their addresses, so that CUDA graphs can hold them. `overlapped` and `interpreted` are those of
    :class:`~deft_backend.planner.on_device.DevicePlanner`.
    """

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
        self.target = target
        self.capacity = capacity
        self.arrays = DevicePlan(capacity, device)
        self.batch = PlannedBatch()
        self._device = device
        self._page_size = page_size
        self._overlapped = overlapped
        self._interpreted = interpreted
        self._device_planner: DevicePlanner | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of device memory: the arrays, and the device planner's memory if it is used."""
        planner = self._device_planner.num_bytes if self._device_planner is not None else 0
        return self.arrays.num_bytes + planner

    @property
    def device_planner(self) -> DevicePlanner:
        """The device planner; the first use allocates its memory.

        Raises PolicyError if it cannot follow the policy, or cannot fill the capacity.
        """
        if self._device_planner is None:
            self._device_planner = DevicePlanner(
                self.target, self.policy, self.arrays, self._device, self._page_size,
                overlapped=self._overlapped, interpreted=self._interpreted,
            )  # fmt: skip
        return self._device_planner

    def plan_on_host(
        self, forest: PrefixForest, blocks: QueryBlocks, target: Target,
        policy: Policy | None = None,
    ) -> Plan:  # fmt: skip
        """Replace the plan by the host planner's; see :func:`~deft_backend.planner.plan_forest`.

        `forest` has a query for each request. `target` is that of requests with these `blocks`.
        A `policy` replaces the usual one for this plan.
        """
        forest = forest_of_blocks(forest, blocks.blocks, blocks.private_tokens)
        plan, grouping = plan_forest(forest, policy or self.policy, target, self.capacity)
        self.use(plan, forest, blocks)
        self.batch = replace(self.batch, grouping=grouping)
        return plan

    def plan_on_device(
        self,
        page_table: torch.Tensor,
        table_rows: torch.Tensor,
        seq_lens: torch.Tensor,
        blocks: QueryBlocks,
        target: Target,
        limits: tuple[int, int] | None = None,
    ) -> None:
        """Replace the plan by the device planner's; see :meth:`DevicePlanner.plan`.

        A batch without requests gets an empty plan.
        """
        planner = self.device_planner
        # A failed launch leaves the arrays half written, so they belong to no batch.
        self.batch = PlannedBatch()
        with device_as_current(self._device):
            if len(seq_lens):
                planner.plan(
                    page_table, table_rows, seq_lens, target=target,
                    private_tokens=blocks.private_tokens, limits=limits,
                )  # fmt: skip
            else:
                self.arrays.clear()
        self.batch = PlannedBatch(requests=len(seq_lens), on_device=True, blocks=blocks)

    def use(self, plan: Plan, forest: PrefixForest, blocks: QueryBlocks = ONE_TOKEN) -> None:
        """Replace the plan by the given one; it must cover the batch of `forest`.

        `forest` has a query for each of the `blocks` of a request. Raises PlanError if the arrays
        cannot hold the plan. Also if it needs the masked tile and the policy does not: captured
        CUDA graphs have no launch for it.
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
        with device_as_current(self._device):
            self.arrays.upload(plan)
        self.batch = PlannedBatch(
            forest.batch_size // blocks.blocks, blocks=blocks, forest=forest, plan=plan
        )

    def clear(self) -> None:
        """Empty the arrays: kernels then return at once for any batch."""
        with device_as_current(self._device):
            self.arrays.clear()
        self.batch = replace(self.batch, requests=0)

    def restore(self) -> None:
        """Put the host planner's last plan back after :meth:`clear`, for kernels on any stream."""
        batch = self.batch
        if batch.plan is not None and batch.forest is not None:
            with device_as_current(self._device):
                self.arrays.upload(batch.plan)
            requests = batch.forest.batch_size // batch.blocks.blocks
            self.batch = replace(batch, requests=requests)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
