"""`PlannedAttention`: what is held for an attention, and the plan that its kernels follow."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from deft_backend.attention.device_target import target_of
from deft_backend.attention.step_inputs import AttentionError, check_attention, check_batch
from deft_backend.attention.workspace import Workspace, entry_bytes
from deft_backend.forest import PrefixForest
from deft_backend.kernels import launch_config
from deft_backend.planner import (
    DevicePlan,
    Plan,
    PlanCapacity,
    PlanError,
    check_capacity,
    plan_forest,
)
from deft_backend.planner.on_device import DevicePlanner
from deft_backend.policies import Auto, Grouping, PolicyError, get_policy
from deft_backend.policies.deft_flatten import DeftFlatten


class PlannedAttention:
    """The half of :class:`~deft_backend.attention.TreeAttention` that plans; see there.

    Memory is allocated here, once: plan and workspace stay where captured graphs found them.
    """

    def __init__(
        self,
        *,
        num_query_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        page_size: int = 1,
        max_batch: int = 256,
        policy: str = "auto",
        capacity: PlanCapacity | None = None,
    ) -> None:
        self.device = torch.device(device)
        if self.device == torch.device("cuda"):
            self.device = torch.device("cuda", torch.cuda.current_device())
        check_attention(
            num_query_heads, num_kv_heads, head_dim, dtype, self.device,
            page_size=page_size, max_batch=max_batch,
        )  # fmt: skip
        self.policy = get_policy(policy)
        self.num_query_heads = num_query_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.page_size = page_size

        self._config = launch_config(head_dim, dtype, self.device, num_query_heads // num_kv_heads)
        self.target = target_of(
            self._config, num_query_heads=num_query_heads, num_kv_heads=num_kv_heads,
            head_dim=head_dim, dtype=dtype, device=self.device, page_size=page_size,
        )  # fmt: skip
        self.capacity = capacity or PlanCapacity.for_batch(
            max_batch, max(self.target.tile_programs), entry_bytes(num_query_heads, head_dim, dtype)
        )
        # Only this policy makes items of several KV ranges: other graphs need no launch for them.
        self._packed = isinstance(self.policy, DeftFlatten)
        self._plan = DevicePlan(self.capacity, self.device)
        self._workspace = Workspace.allocate(
            self.capacity.max_entries, num_query_heads, head_dim, dtype, self.device
        )
        self._device_planner: DevicePlanner | None = None
        self._planned_on_device = False
        self._planned = 0
        """Requests of the plan on the device."""
        self._rows = torch.arange(self.capacity.max_batch, dtype=torch.int32, device=self.device)
        self.forest: PrefixForest | None = None
        self.last_plan: Plan | None = None
        self.grouping: Grouping | None = None

    @property
    def workspace_bytes(self) -> int:
        """Bytes of device memory held: partial results, the plan, and what the device planner, once
        there is one, works in."""
        planner = self._device_planner.num_bytes if self._device_planner is not None else 0
        return self._workspace.num_bytes + self._plan.num_bytes + planner

    @property
    def few_queries(self) -> int:
        """Most queries whose results stage 2 merges in its way for few of them."""
        return self._config.few_queries(self.num_query_heads)

    def plan(self, forest: PrefixForest) -> Plan:
        """Plan a batch and put the plan on the device, on the current stream.

        Raises
        ------
        PlanError
            If the batch is larger than `max_batch`, or its tree needs more than the arrays hold.
        """
        plan, grouping = plan_forest(forest, self.policy, self.target, self.capacity)
        self.use(plan, forest)
        self.grouping = grouping
        return plan

    def plan_on_device(
        self,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        table_rows: torch.Tensor | None = None,
    ) -> None:
        """Plan a batch by launches alone, on the current stream, following the policy ``auto``.

        The host learns nothing of the plan (`last_plan` stays None) and waits for nothing. Captured
        in a CUDA graph, it plans the batch of each replay; a row of length 0 stands for no request.

        Parameters
        ----------
        page_table : [rows, P] int32 or int64
            Page ids (slot ids when `page_size` is 1), on the attention's device.
        seq_lens : [B] int32 or int64
            Tokens of each request.
        table_rows : [B] int32 or int64, optional
            Row of the page table of each request; default: row ``b``.

        Raises
        ------
        AttentionError
            If shapes, dtypes or devices do not match, or the batch is larger than `max_batch`.
        PolicyError
            If the attention's policy is not ``auto``, or its `max_batch` is too large for plans
            made on the device.
        """
        batch = len(seq_lens)
        if batch > self.capacity.max_batch:
            raise AttentionError(
                f"the batch holds {batch} requests; the plan was sized for "
                f"{self.capacity.max_batch}: raise max_batch"
            )
        if table_rows is None:
            table_rows = self._own_rows(page_table, batch)
        check_batch(page_table, seq_lens, table_rows, self.device)
        planner = self.device_planner
        # Whatever happens below, the plan before is gone from the device.
        self.forest = self.last_plan = self.grouping = None
        self._planned_on_device = False
        with self._current():
            if batch:
                planner.plan(page_table, table_rows, seq_lens)
            else:
                self._plan.clear()
        self._planned_on_device = True
        self._planned = batch

    @property
    def device_planner(self) -> DevicePlanner:
        """What :meth:`plan_on_device` launches; made at its first use, with its scratch memory."""
        if self._device_planner is None:
            if not isinstance(self.policy, Auto):
                raise PolicyError(
                    f"plans made on the device follow the policy auto, not {self.policy.name}; "
                    "plan on the host, or choose auto"
                )
            self._device_planner = DevicePlanner(
                self.target, self._plan, self.device, self.page_size,
                overlapped=self._config.overlapped,
            )  # fmt: skip
        return self._device_planner

    def clear_plan(self) -> None:
        """Empty the plan on the device: kernels return at once, whatever batch they are given."""
        with self._current():
            self._plan.clear()
        self._planned = 0

    def restore_plan(self) -> None:
        """Put the last plan back after :meth:`clear_plan`, for kernels on any stream."""
        if self.last_plan is not None and self.forest is not None:
            with self._current():
                self._plan.upload(self.last_plan)
            self._planned = self.forest.batch_size
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def use(self, plan: Plan, forest: PrefixForest) -> None:
        """Put a plan made elsewhere on the device; it must cover the batch of `forest`.

        Raises
        ------
        PlanError
            If it holds items of several KV ranges, for which captured graphs of this policy have
            no launch.
        """
        if plan.tile_ptr[-1] > plan.tile_ptr[-2] and not self._packed:
            raise PlanError(
                f"the plan has {int(plan.tile_ptr[-1] - plan.tile_ptr[-2])} items of several KV "
                f"ranges, which policy {self.policy.name} never makes; create TreeAttention with "
                "policy='deft-flatten'"
            )
        check_capacity(plan, self.capacity)
        with self._current():
            self._plan.upload(plan)
        self._planned = forest.batch_size
        self.forest, self.last_plan, self.grouping = forest, plan, None
        self._planned_on_device = False

    def _own_rows(self, page_table: torch.Tensor, batch: int) -> torch.Tensor:
        """[batch]: row ``b`` of the page table for request ``b``."""
        if batch > min(len(page_table), len(self._rows)):
            raise AttentionError(
                f"{batch} requests, a page table of {len(page_table)} rows and max_batch "
                f"{len(self._rows)}; expected a row each, or table_rows, and a larger max_batch"
            )
        return self._rows[:batch]

    def _is_elsewhere(self) -> bool:
        """Whether another GPU than the attention's is the current one, where launches go."""
        return self.device.type == "cuda" and torch.cuda.current_device() != self.device.index

    def _current(self) -> AbstractContextManager[object]:
        """Launches and copies within go to the attention's device."""
        return torch.cuda.device(self.device) if self._is_elsewhere() else nullcontext()

    def poison_workspace(self) -> None:
        """Fill the workspace with NaN: a partial result read before it is written then shows."""
        self._workspace.poison()
