"""`TreeAttention`: plan a batch once, then run its attention for every layer and step."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import torch

from deft_backend.attention.checks import AttentionError, check_attention, check_step
from deft_backend.attention.planned_attention import (
    PlannedAttention,
    PlannedBatch,
    Rows,
    device_as_current,
    numbered,
)
from deft_backend.attention.run_inputs import QueryShape, QueryShapes, paged, put_scales_together
from deft_backend.costs.table_lookup import shipped_on
from deft_backend.forest import PrefixForest
from deft_backend.kernels import (
    Gpu,
    LayerAddresses,
    LayerLaunches,
    Partials,
    Step,
    layer_addresses,
    run_plan,
    unsupported,
)
from deft_backend.planner import Plan, PlanCapacity
from deft_backend.policies import Invariant, Target, get_policy
from deft_backend.policies.grouping import partial_result_bytes
from deft_backend.shapes import AttentionShape, QueryBlocks


class TreeAttention(PlannedAttention):
    """Attention of decode and verification over a batch that shares prefixes: plan, then run.

    :meth:`plan` plans a forest on the CPU, whenever the batch's composition changes.
    :meth:`plan_batch` plans from the page table, in every step: on a GPU by a few launches, which a
    CUDA graph can hold. :meth:`run` launches the attention kernels. Sequences may grow between plan
    and run, because leaves have no fixed end.

    In decode each request has one query token. To verify a draft, it has several: the last tokens
    of its sequence, which form a chain or a tree. Then `query_tokens` says how many at most.

    The constructor allocates all device memory once, and its addresses never change.

    Parameters
    ----------
    num_query_heads, num_kv_heads, head_dim : int
        Shape of the attention; query heads are a multiple of KV heads (MHA, GQA, MQA).
    dtype : torch.dtype
        Of queries and output: float16 or bfloat16; on the CPU also float32.
    kv_dtype : torch.dtype, optional
        Of the KV cache: `dtype`, which is the default, or float8_e4m3fn or float8_e5m2.
    device : torch.device or str
        An NVIDIA GPU, or the CPU, where the same kernels run in Triton's interpreter.
    page_size : int
        Tokens of a page of the KV cache.
    max_batch : int
        Most requests a plan will hold; sizes the plan's arrays and the workspace.
    query_tokens : int
        Most query tokens of a request. It also sizes the plan's arrays and the workspace.
    policy : str
        How KV and queries are grouped, by name; see :data:`deft_backend.policies.POLICY_NAMES`.
    max_tokens : int
        Most tokens of a request, and of a row of the page table. Only policy `invariant` reads it:
        its plans must always fit, so it sizes their arrays and the workspace.
    capacity : PlanCapacity, optional
        Sizes of the plan's arrays; default: a bound that follows from `max_batch`.
    compiled_for : Gpu, optional
        A GPU that is not at hand. Tensors lie on the CPU, and launches can only be recorded
        (:func:`deft_backend.compile.variants.recorded`), to compile for that GPU.

    Raises
    ------
    AttentionError
        If the kernels cannot run this attention; the message names the value and the supported
        ones.
    PolicyError
        If there is no such policy, or `invariant` cannot hold a batch of `max_batch`.

    Examples
    --------
    Three requests share a prefix of 4 tokens and hold 1, 2 and 3 tokens of their own:

    >>> import torch
    >>> from deft_backend import TreeAttention, forest_from_page_tables
    >>> page_table = torch.tensor([[0, 1, 2, 3, 4, 0, 0], [0, 1, 2, 3, 5, 6, 0],
    ...                            [0, 1, 2, 3, 7, 8, 9]], dtype=torch.int32)
    >>> seq_lens = torch.tensor([5, 6, 7], dtype=torch.int32)
    >>> k_cache, v_cache = torch.randn(2, 10, 2, 64)     # 10 pages of a token, 2 KV heads
    >>> q = torch.randn(3, 4, 64)                        # 4 query heads
    >>> attention = TreeAttention(num_query_heads=4, num_kv_heads=2, head_dim=64,
    ...                           dtype=torch.float32, device="cpu", max_batch=3)
    >>> forest = forest_from_page_tables(page_table, seq_lens)
    >>> forest.tokens_attended, forest.tokens_stored
    (18, 10)
    >>> plan = attention.plan(forest)
    >>> attention.run(q, k_cache, v_cache, page_table, seq_lens).shape
    torch.Size([3, 4, 64])

    Verification of two drafts: the last 3 tokens of each request are query tokens. Without bits
    they form a chain. With bits, query token 2 is no descendant of query token 1.

    >>> attention = TreeAttention(num_query_heads=4, num_kv_heads=2, head_dim=64,
    ...                           dtype=torch.float32, device="cpu", max_batch=2, query_tokens=3)
    >>> forest = forest_from_page_tables(page_table[1:], seq_lens[1:])
    >>> plan = attention.plan(forest, query_tokens=3)
    >>> q = torch.randn(6, 4, 64)                        # request-major: 2 requests of 3 tokens
    >>> chain = attention.run(q, k_cache, v_cache, page_table[1:], seq_lens[1:])
    >>> bits = torch.tensor([[0b001], [0b011], [0b101]]).expand(2, 3, 1)
    >>> tree = attention.run(q, k_cache, v_cache, page_table[1:], seq_lens[1:], ancestors=bits)
    >>> torch.equal(chain[:2], tree[:2]), torch.equal(chain[2], tree[2])
    (True, False)
    """

    unsupported = staticmethod(unsupported)

    def __init__(
        self,
        *,
        num_query_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str,
        kv_dtype: torch.dtype | None = None,
        page_size: int = 1,
        max_batch: int = 256,
        query_tokens: int = 1,
        policy: str = "auto",
        max_tokens: int = 131_072,
        capacity: PlanCapacity | None = None,
        compiled_for: Gpu | None = None,
    ) -> None:
        device = numbered(device)
        heads = (num_query_heads, num_kv_heads, head_dim)
        shape = AttentionShape(*heads, dtype, kv_dtype or dtype, device, page_size)
        check_attention(shape, max_batch=max_batch, query_tokens=query_tokens, gpu=compiled_for)
        self.num_query_heads = num_query_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.kv_dtype = shape.kv_dtype
        self.query_tokens = query_tokens

        rule = get_policy(policy)
        one_way = isinstance(rule, Invariant)
        self._shapes = QueryShapes(shape, compiled_for, one_way=one_way)
        _, config, target = self._shapes[1]
        blocks = self._shapes[query_tokens].blocks.blocks
        # Requests with fewer than `query_tokens` query tokens may have longer blocks.
        tokens = QueryBlocks.most_tokens(query_tokens, shape.gqa_group)
        result_bytes = tokens * partial_result_bytes(num_query_heads, head_dim, dtype.itemsize)
        if one_way:
            # A table that `deft tune` measured on one machine must not change bits.
            costs = shipped_on(shape)
            rule = invariant = Invariant.for_target(replace(target, cost_model=costs))
            invariant.check_workspace(max_batch * blocks, max_tokens, result_bytes)
            most = max_batch * blocks * invariant.most_chunks(max_tokens)  # results of all queries
            capacity = capacity or PlanCapacity(max_batch * blocks, most, most, most)
        capacity = capacity or PlanCapacity.for_batch(
            max_batch * blocks, max(target.tile_programs), result_bytes
        )
        self.max_batch = capacity.max_batch // blocks
        planned = (rule, target, capacity, device, page_size)
        super().__init__(*planned, overlapped=config.overlapped, interpreted=config.interpreted)
        results = (capacity.max_entries * tokens, num_query_heads)
        # Divided by its largest element, a result of any range keeps 11 bits in float16.
        held = torch.float32 if dtype == torch.float32 else torch.float16
        out = torch.empty((*results, head_dim), dtype=held, device=device)
        lse, scale = torch.empty((2, *results), dtype=torch.float32, device=device)
        self._workspace = Partials(out, lse, scale)
        self._shape = shape
        #: [1] float32: the scale 1 on the device, for a cache of 8 bits whose layer has no scale.
        self.unit_scale = torch.ones(1, dtype=torch.float32, device=device)
        # The last run's batch, the layout of its layer, and what repeats it for other layers.
        self._repeatable: tuple[PlannedBatch, tuple[object, ...], LayerLaunches] | None = None

    @property
    def target(self) -> Target:
        """What the last plan was made for; at first, requests with one query token."""
        return self._shapes[self.batch.blocks.query_tokens].target

    @property
    def short_tokens(self) -> int:
        """:attr:`Invariant.short_tokens <deft_backend.policies.Invariant>`; 0 for others."""
        return getattr(self.policy, "short_tokens", 0)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of device memory: partial results, the plan and the device planner, if used."""
        held: list[torch.Tensor] = list(self._workspace)
        return sum(part.nbytes for part in held) + self._plan_bytes()

    def plan(self, forest: PrefixForest, *, query_tokens: int = 1) -> Plan:
        """Plan a forest on the CPU; copy the plan to the device, on the current stream.

        Parameters
        ----------
        forest : PrefixForest
            Of the batch's requests. Their tokens include their query tokens.
        query_tokens : int
            Most query tokens of a request of this batch.

        Raises
        ------
        AttentionError, PlanError
            If `query_tokens` is larger than the attention's, or the batch than `max_batch`, or the
            tree needs more than the arrays hold.
        """
        shape = self._shape_of(query_tokens)
        return self._plan_forest(forest, shape.blocks, shape.target)

    def _blocks_of(self, query_tokens: int | None) -> QueryBlocks:
        return self._shape_of(1 if query_tokens is None else query_tokens).blocks

    def _plan_rows(self, rows: Rows, blocks: QueryBlocks, *, on_device: bool) -> None:
        if on_device:
            self._launch_plan(rows, blocks, self._shapes[blocks.query_tokens].target)
        else:
            self._plan_by_reference(rows, partial(self.plan, query_tokens=blocks.query_tokens))

    def use(self, plan: Plan, forest: PrefixForest, *, query_tokens: int = 1) -> None:
        """Use the given plan; it must cover the batch of `forest`.

        With several query tokens, `forest` is that of the query blocks
        (:func:`deft_backend.forest.forest_of_blocks`), and the plan's queries are these. Raises
        PlanError if the plan does not fit `capacity`, or needs the masked tile and the policy does
        not.
        """
        self._use(plan, forest, self._shape_of(query_tokens).blocks)

    def poison_workspace(self) -> None:
        """Fill the workspace with NaN, so that a read before a write shows in the output."""
        for part in self._workspace:
            part.fill_(float("nan"))

    def run(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        table_rows: torch.Tensor | None = None,
        query_start: torch.Tensor | None = None,
        ancestors: torch.Tensor | None = None,
        sm_scale: float | None = None,
        logit_cap: float = 0.0,
        k_scale: float | torch.Tensor = 1.0,
        v_scale: float | torch.Tensor = 1.0,
        sinks: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        static_launch: bool = False,
    ) -> torch.Tensor:
        """Attention of the planned batch.

        The plan was made for requests of up to Q query tokens, the last tokens of each request. In
        decode Q is 1. Every query token sees all tokens before its request's query tokens. Without
        `ancestors` it also sees itself and the query tokens before it.

        Parameters
        ----------
        q : [T, Hq, D]
            The query tokens, one request after another. Without `query_start` each request has
            Q: token ``j`` of request ``r`` is ``q[r * Q + j]``.
        k_cache, v_cache : [pages, page_size, Hkv, D], or [pages, Hkv, D] if `page_size` is 1
            The KV cache of one layer; any strides with a contiguous last dimension, and the same in
            both.
        page_table, seq_lens, table_rows
            As in :meth:`plan_batch`, as they are now. A plan of :meth:`plan_batch` keeps its own
            rows and ignores these.
        query_start : [B + 1] int32, optional
            Where in `q` each request's query tokens begin, if their numbers differ: request ``r``
            has ``query_start[r + 1] - query_start[r]``, 0 to Q of them. Only the device knows these
            numbers, so `run` cannot check that none exceeds Q. Where `q` holds a token of no
            request, `out` stays as it is.
        ancestors : [B, Q, ceil(Q / 64)] int64, optional
            Who sees whom in a token tree. Bit ``k`` of word ``w`` is set if query token ``j`` sees
            query token ``64 * w + k`` of its request. A token sees itself only if its bit is set.
        sm_scale, logit_cap : float, optional
            Scale of the scores, ``1 / sqrt(D)`` by default, and their soft cap,
            ``cap * tanh(score / cap)``; 0 for none.
        k_scale, v_scale : float, or a tensor of one float32 on the attention's device
            Of a cache of 8 bits: what a stored key and a stored value are multiplied with, above 0.
            The kernels read a tensor in every run, so a CUDA graph sees later values.
        sinks : [Hq] float32, bfloat16 or float16, optional
            A score of each query head without a value: ``exp(sink)`` joins the sum that divides the
            output. The soft cap does not apply to it.
        out : [T, Hq, D], optional
            Where the result goes.
        static_launch : bool
            Launch every kernel that a batch of this size may need. A CUDA graph that serves later
            plans needs this; a plan of the device planner always gets it.

        Returns
        -------
        [T, Hq, D] of q's dtype

        Raises
        ------
        AttentionError
            If nothing was planned, shapes, dtypes or devices do not match, or `sm_scale` is not
            finite and above 0.
        """
        planned = self.batch
        query_tokens = planned.blocks.query_tokens
        given = len(seq_lens) if query_start is not None else len(q) // query_tokens
        if static_launch or planned.from_rows:
            requests = given
        elif planned.forest is not None:
            requests = planned.forest.batch_size // planned.blocks.blocks
        else:
            raise AttentionError("nothing is planned; call plan(forest) first")
        if requests < planned.requests:
            raise AttentionError(
                f"q is for {requests} requests; the plan is for {planned.requests} requests: plan "
                "the batch that is run"
            )
        rows = len(q) if query_start is not None else requests * query_tokens
        if out is None:
            # A CUDA graph may be replayed for fewer requests than it was captured for. Plans from
            # page tables cover padding requests if they skip none; other outputs must not be stale.
            covered = query_start is None and requests <= planned.requests
            covered = covered and (planned.from_rows or not static_launch) and not self.skips_empty
            out = torch.empty_like(q) if covered else torch.zeros_like(q)
        by_request = self._first_rows(page_table, requests) if table_rows is None else table_rows
        keys, values = paged(k_cache, self.page_size), paged(v_cache, self.page_size)
        batch = (page_table, seq_lens, by_request, query_start, ancestors, sinks)
        scale = 1.0 / math.sqrt(self.head_dim) if sm_scale is None else sm_scale
        step = Step(q, keys, values, out, *batch, k_scale, v_scale, scale, logit_cap)
        check_step(self._shape, step, requests=requests, rows=rows, query_tokens=query_tokens)
        if requests == 0 or rows == 0:
            return out
        put_scales_together(step, self.unit_scale)
        step.table_rows = self._rows_of_ranges(table_rows)
        config = self._shapes[query_tokens].config
        # GPUs round to bfloat16, Triton's interpreter truncates: let PyTorch convert. Outputs of
        # requests that the plan does not cover stay as they are.
        truncates = config.interpreted and self.dtype == torch.bfloat16
        if truncates:
            step.out = out.float()
        with device_as_current(self.device):
            launches = run_plan(
                config,
                self.arrays,
                step,
                self._workspace,
                blocks=planned.blocks,
                known_plan=None if static_launch else planned.plan,
                masked_tiles=self.policy.several_segments,
            )
        if truncates:
            out.copy_(step.out)
        self._repeatable = None
        # A scale that was put on the device for this run has no address in a `LayerAddresses`.
        given = isinstance(k_scale, torch.Tensor) == isinstance(v_scale, torch.Tensor)
        if launches is not None and given:
            layer = layer_addresses(
                k_cache,
                v_cache,
                sm_scale=step.sm_scale,
                logit_cap=logit_cap,
                k_scale=k_scale,
                v_scale=v_scale,
                sinks=sinks,
            )
            self._repeatable = (planned, layer.layout, launches)
        return out

    def repeat(self, layer: LayerAddresses, q: torch.Tensor, out: torch.Tensor) -> bool:
        """Run another layer of the step that :meth:`run` ran last, at a fraction of its CPU time.

        Parameters
        ----------
        layer : LayerAddresses
            Of the layer's cache, sinks and scales, as ``attention.layer_addresses`` gives them.
        q, out : [T, Hq, D]
            Queries, and where the result goes. Rows behind the batch's stay as they are.

        Returns
        -------
        bool
            False, and nothing was launched, if the layer differs in more than addresses, or if
            another plan was made since.
        """
        if self._repeatable is None:
            return False
        batch, layout, launches = self._repeatable
        return batch is self.batch and launches.run(layout, layer, q, out)

    def _shape_of(self, query_tokens: int) -> QueryShape:
        """How a batch of so many query tokens a request is planned and run."""
        if not 1 <= query_tokens <= self.query_tokens:
            raise AttentionError(
                f"query_tokens is {query_tokens}; the attention was made for 1 to "
                f"{self.query_tokens}: raise query_tokens of TreeAttention"
            )
        return self._shapes[query_tokens]
