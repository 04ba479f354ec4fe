"""`TreeAttention`: plan a batch once, run its decode attention as often as needed."""

from __future__ import annotations

import math

import torch

from deft_backend.attention.planned import PlannedAttention
from deft_backend.attention.step_inputs import AttentionError, check_step
from deft_backend.kernels import run_plan, unsupported


class TreeAttention(PlannedAttention):
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
        Of queries, KV cache and output: float16 or bfloat16; on the CPU float32, too.
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

    unsupported = staticmethod(unsupported)

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
        page_table : [rows, P] int32 or int64
            Page ids (slot ids when `page_size` is 1).
        seq_lens : [B] int32 or int64
            Current tokens of each request, the token of `q` included.
        table_rows : [B] int, optional
            Row of the page table of each request; default: row ``b``. A plan made on the device
            holds those that it was made with.
        sm_scale : float, optional
            Scale of the scores; default ``1 / sqrt(D)``.
        logit_cap : float
            Soft cap of the scores, ``cap * tanh(score / cap)``; 0 for none.
        out : [B, Hq, D], optional
            Where the result goes.
        static_launch : bool
            Launch every kernel that a batch of this size may need, as a CUDA graph that serves
            later plans must; with a plan made on the device nothing else is possible, and this is
            not asked.

        Returns
        -------
        [B, Hq, D] of q's dtype

        Raises
        ------
        AttentionError
            If nothing was planned, shapes, dtypes or devices do not match, or `sm_scale` is not
            above 0.
        """
        if self._is_elsewhere():
            with self._current():
                return self.run(
                    q, k_cache, v_cache, page_table, seq_lens, table_rows=table_rows,
                    sm_scale=sm_scale, logit_cap=logit_cap, out=out, static_launch=static_launch,
                )  # fmt: skip
        static_launch = static_launch or self._planned_on_device
        k_cache, v_cache = self._paged(k_cache), self._paged(v_cache)
        if out is None:
            # A graph is replayed for fewer requests than it was captured for: rows that no request
            # owns must not hold whatever was in memory. Plans made on the device have those that
            # they were made with, as requests of no or few tokens; those made on the host do not.
            padded = static_launch and not (self._planned_on_device and len(q) <= self._planned)
            out = torch.zeros_like(q) if padded else torch.empty_like(q)
        if sm_scale is not None and not sm_scale > 0.0:
            raise AttentionError(f"sm_scale is {sm_scale}; expected a number above 0")
        if self.forest is None and not static_launch:
            raise AttentionError("nothing is planned; call plan(forest) first")
        batch = self.forest.batch_size if self.forest is not None and not static_launch else len(q)
        if batch < self._planned:
            raise AttentionError(
                f"q holds {batch} queries; the plan is for {self._planned} requests: plan the "
                "batch that is run"
            )
        own_rows = table_rows is None
        if table_rows is None:
            table_rows = self._own_rows(page_table, batch)
        check_step(
            q, k_cache, v_cache, page_table, seq_lens, table_rows, out,
            queries=(batch, self.num_query_heads, self.head_dim),
            page=(self.page_size, self.num_kv_heads, self.head_dim),
            dtype=self.dtype, device=self.device,
        )  # fmt: skip
        if batch == 0:
            return out
        # Plans made on the device hold each range's row of the page table. One made on the host
        # holds its row of the batch: the same where requests have rows of their own.
        by_segment = self._planned_on_device or own_rows
        if by_segment:
            listed = "segment_table" if self._planned_on_device else "segment_row"
            table_rows = self._plan[listed]
        # Triton's interpreter truncates to bfloat16; torch rounds. Rows that the plan has no
        # request for stay as they are.
        truncates = self._config.interpreted and self.dtype == torch.bfloat16
        result = out.float() if truncates else out
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
            *self._workspace,
            sm_scale=1.0 / math.sqrt(self.head_dim) if sm_scale is None else sm_scale,
            logit_cap=logit_cap,
            host_plan=None if static_launch else self.last_plan,
            packed=self._packed,
            table_by_segment=by_segment,
        )
        if truncates:
            out.copy_(result)
        return out

    def _paged(self, cache: torch.Tensor) -> torch.Tensor:
        return cache.unsqueeze(1) if cache.dim() == 3 and self.page_size == 1 else cache
