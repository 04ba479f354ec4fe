"""The library: plan a batch once, run its decode attention as often as needed."""

from __future__ import annotations

import math

import torch

from deft_backend.attention_inputs import (
    AttentionError,
    check_device,
    check_integers,
    check_operands,
    check_table,
)
from deft_backend.cost_tables import cost_model_on
from deft_backend.forest import PrefixForest
from deft_backend.kernels import HEAD_DIMS, launch_config, run_plan, unsupported
from deft_backend.planner import (
    TILE_SEGMENTS,
    DevicePlan,
    Plan,
    PlanCapacity,
    PlanError,
    check_capacity,
    plan_forest,
)
from deft_backend.planner.on_device import DevicePlanner
from deft_backend.policies import Auto, Grouping, PolicyError, Target, get_policy
from deft_backend.policies.deft_flatten import DeftFlatten


class TreeAttention:
    """Decode attention over a batch that shares prefixes, in two steps: plan and run.

    :meth:`plan` is host work, needed when the batch's composition changes; :meth:`plan_on_device`
    is a few launches that make the plan from the page table, cheap enough for every step and for a
    CUDA graph. :meth:`run` launches the kernels; sequences may have grown since the plan was made
    (their leaves are open).

    Parameters
    ----------
    num_query_heads, num_kv_heads, head_dim : int
        Shape of the attention; query heads are a multiple of KV heads (MHA, GQA, MQA).
    dtype : torch.dtype
        Of queries, KV cache and output: float16, bfloat16 or float32.
    device : torch.device or str
        An NVIDIA GPU, or the CPU, where the same kernels run in Triton's interpreter.
    page_size : int
        Tokens a page of the KV cache (1 when the page table holds one slot a token).
    max_batch : int
        Most requests a plan will hold; sizes the plan's arrays and the workspace.
    policy : str
        How KV and queries are grouped, by name; see :data:`deft_backend.policies.POLICY_NAMES`.
    capacity : PlanCapacity, optional
        Array sizes, if the bound that follows from `max_batch` should be another.

    Attributes
    ----------
    forest, last_plan, grouping
        What the last :meth:`plan` was made of; :func:`deft_backend.explain.explain` shows it.

    Raises
    ------
    AttentionError
        If the kernels cannot run this attention; the message names the value and what can be run.
    PolicyError
        If there is no such policy.

    Examples
    --------
    Three requests share a prefix of 4 tokens and hold 1, 2 and 3 tokens of their own:

    >>> import torch
    >>> from deft_backend import TreeAttention, forest_from_page_tables
    >>> page_table = torch.tensor([[0, 1, 2, 3, 4, 0, 0], [0, 1, 2, 3, 5, 6, 0],
    ...                            [0, 1, 2, 3, 7, 8, 9]], dtype=torch.int32)
    >>> seq_lens = torch.tensor([5, 6, 7], dtype=torch.int32)
    >>> k_cache, v_cache = torch.randn(2, 10, 2, 64)     # 10 slots, 2 KV heads
    >>> q = torch.randn(3, 4, 64)                        # 4 query heads
    >>> attention = TreeAttention(num_query_heads=4, num_kv_heads=2, head_dim=64,
    ...                           dtype=torch.float32, device="cpu", max_batch=3)
    >>> forest = forest_from_page_tables(page_table, seq_lens)
    >>> forest.tokens_attended, forest.tokens_stored
    (18, 10)
    >>> plan = attention.plan(forest)
    >>> attention.run(q, k_cache, v_cache, page_table, seq_lens).shape
    torch.Size([3, 4, 64])
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
        reason = unsupported(num_query_heads, num_kv_heads, head_dim, dtype, self.device)
        if reason is not None:
            raise AttentionError(f"tree attention cannot run: {reason}")
        if page_size < 1:
            raise AttentionError(f"page_size is {page_size}; expected at least 1 token a page")
        if max_batch < 1:
            raise AttentionError(f"max_batch is {max_batch}; expected at least 1 request")
        self.policy = get_policy(policy)
        self.num_query_heads = num_query_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.page_size = page_size

        self._config = launch_config(head_dim, dtype, self.device, num_query_heads // num_kv_heads)
        tile_programs = tuple(max(1, t.programs // num_kv_heads) for t in self._config.tiles)
        programs = tile_programs[-1]
        # Outputs in 16 bits over their row's largest element: 11 bits of mantissa, any range.
        partial_dtype = torch.float32 if dtype == torch.float32 else torch.float16
        entry_bytes = num_query_heads * (head_dim * partial_dtype.itemsize + 8)
        self.capacity = capacity or PlanCapacity.for_batch(max_batch, programs, entry_bytes)
        self.target = Target(
            num_query_heads=num_query_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            dtype_bytes=dtype.itemsize,
            num_programs=programs,
            tile_rows=tuple(tile.rows for tile in self._config.tiles),
            tile_programs=tile_programs,
            tile_segments=TILE_SEGMENTS,
            # The interpreter takes larger blocks, for speed; plans are the same on every device.
            block_tokens=min(64, self._config.tiles[-1].block_tokens),
            cost_model=cost_model_on(
                self.device, num_query_heads, num_kv_heads, head_dim, dtype, page_size
            ),
        )
        # Only this policy makes items of several KV ranges: other graphs need no launch for them.
        self._packed = isinstance(self.policy, DeftFlatten)
        self._plan = DevicePlan(self.capacity, self.device)
        entries = self.capacity.max_entries
        self._partial_out = torch.empty(
            (entries, num_query_heads, head_dim), dtype=partial_dtype, device=self.device
        )
        self._partial_lse, self._partial_scale = torch.empty(
            (2, entries, num_query_heads), dtype=torch.float32, device=self.device
        )
        self._device_planner: DevicePlanner | None = None
        self._planned_on_device = False
        self._rows = torch.arange(self.capacity.max_batch, dtype=torch.int32, device=self.device)
        self.forest: PrefixForest | None = None
        self.last_plan: Plan | None = None
        self.grouping: Grouping | None = None

    unsupported = staticmethod(unsupported)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of device memory held: partial results and the plan."""
        partials = (self._partial_out, self._partial_lse, self._partial_scale)
        return sum(int(tensor.nbytes) for tensor in partials) + self._plan.num_bytes

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
            table_rows = self._rows[:batch]
        if table_rows.shape != seq_lens.shape:
            raise AttentionError(
                f"table_rows has shape {list(table_rows.shape)}; expected {list(seq_lens.shape)}"
            )
        integers = {"page_table": page_table, "seq_lens": seq_lens, "table_rows": table_rows}
        check_integers(**integers)
        check_device(self.device, **integers)
        check_table(page_table)
        self.forest = self.last_plan = self.grouping = None
        self._planned_on_device = True
        if batch:
            self.device_planner.plan(page_table, table_rows, seq_lens)

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
        self._plan.clear()

    def restore_plan(self) -> None:
        """Put the last plan back after :meth:`clear_plan`, for kernels on any stream."""
        if self.last_plan is not None:
            self._plan.upload(self.last_plan)
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
        self._plan.upload(plan)
        self.forest, self.last_plan, self.grouping = forest, plan, None
        self._planned_on_device = False

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        table_rows: torch.Tensor | None = None,
        sm_scale: float | None = None,
        logit_cap: float = 0.0,
        out: torch.Tensor | None = None,
        static_launch: bool = False,
    ) -> torch.Tensor:
        """Decode attention of the planned batch.

        Parameters
        ----------
        q : [B, Hq, D]
            One query token a request.
        k_cache, v_cache : [pages, page_size, Hkv, D], or [slots, Hkv, D] when `page_size` is 1
            The KV cache of one layer; any strides with a contiguous last dimension.
        page_table : [rows, P] int32
            Page ids (slot ids when `page_size` is 1).
        seq_lens : [B] int32 or int64
            Current tokens of each request, the token of `q` included.
        table_rows : [B] int, optional
            Row of the page table of each request; default: row ``b``.
        sm_scale : float, optional
            Scale of the scores; default ``1 / sqrt(D)``.
        logit_cap : float
            Soft cap of the scores, ``cap * tanh(score / cap)``; 0 for none.
        out : [B, Hq, D], optional
            Where the result goes.
        static_launch : bool
            Launch every kernel, needed or not, as a CUDA graph that serves later plans must; with a
            plan made on the device nothing else is possible, and this is not asked.

        Returns
        -------
        [B, Hq, D] of q's dtype

        Raises
        ------
        AttentionError
            If nothing was planned, or shapes, dtypes or devices do not match.
        """
        if self.device.type == "cuda" and torch.cuda.current_device() != self.device.index:
            with torch.cuda.device(self.device):  # kernels run on the current device
                return self.run(
                    q, k_cache, v_cache, page_table, seq_lens, table_rows=table_rows,
                    sm_scale=sm_scale, logit_cap=logit_cap, out=out, static_launch=static_launch,
                )  # fmt: skip
        static_launch = static_launch or self._planned_on_device
        k_cache, v_cache = self._paged(k_cache), self._paged(v_cache)
        if out is None:
            # A graph is replayed for fewer requests than it was captured for: rows that no request
            # owns must not hold whatever was in memory. Plans made on the device have them, as
            # requests of no or few tokens; those made on the host do not.
            padded = static_launch and not self._planned_on_device
            out = torch.zeros_like(q) if padded else torch.empty_like(q)
        if sm_scale is not None and not sm_scale > 0.0:
            raise AttentionError(f"sm_scale is {sm_scale}; expected a number above 0")
        batch = self._check(q, k_cache, v_cache, page_table, seq_lens, out, static_launch)
        if table_rows is None:
            table_rows = self._rows[:batch]
        plan = self.last_plan
        if batch == 0:
            return out
        # Triton's interpreter truncates to bfloat16; torch rounds.
        truncates = self._config.interpreted and self.dtype == torch.bfloat16
        result = torch.empty_like(out, dtype=torch.float32) if truncates else out
        run_plan(
            self._config,
            self._plan,
            q,
            k_cache,
            v_cache,
            page_table,
            table_rows,
            seq_lens,
            result,
            self._partial_out,
            self._partial_lse,
            self._partial_scale,
            sm_scale=1.0 / math.sqrt(self.head_dim) if sm_scale is None else sm_scale,
            logit_cap=logit_cap,
            host_plan=None if static_launch else plan,
            packed=self._packed,
        )
        if truncates:
            out.copy_(result)
        return out

    def poison_workspace(self) -> None:
        """Fill the workspace with NaN: a partial result read before it is written then shows."""
        self._partial_out.fill_(float("nan"))
        self._partial_lse.fill_(float("nan"))
        self._partial_scale.fill_(float("nan"))

    def _paged(self, cache: torch.Tensor) -> torch.Tensor:
        return cache.unsqueeze(1) if cache.dim() == 3 and self.page_size == 1 else cache

    def _check(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        out: torch.Tensor,
        static_launch: bool,
    ) -> int:
        if self.forest is None and not static_launch:
            raise AttentionError("nothing is planned; call plan(forest) first")
        batch = self.forest.batch_size if self.forest is not None and not static_launch else len(q)
        heads = (self.num_query_heads, self.head_dim)
        cache = (self.page_size, self.num_kv_heads, self.head_dim)
        check_operands(
            {
                "q": (q, (batch, *heads)), "out": (out, (batch, *heads)),
                "k_cache": (k_cache, (len(k_cache), *cache)),
                "v_cache": (v_cache, (len(v_cache), *cache)),
            },
            self.dtype,
        )  # fmt: skip
        if len(seq_lens) != batch:
            raise AttentionError(f"seq_lens holds {len(seq_lens)} lengths; expected {batch}")
        check_table(page_table)
        check_integers(page_table=page_table, seq_lens=seq_lens)
        tensors = {"page_table": page_table, "seq_lens": seq_lens, "q": q, "out": out}
        check_device(self.device, **tensors, k_cache=k_cache, v_cache=v_cache)
        return batch


__all__ = ["HEAD_DIMS", "AttentionError", "PlanError", "TreeAttention"]
