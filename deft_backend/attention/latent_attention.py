"""`LatentAttention`: multi-head latent attention (MLA) over a plan, by the host's own kernel."""

from __future__ import annotations

import numpy as np
import torch

from deft_backend.attention.checks import AttentionError, check_tensor
from deft_backend.attention.planned_attention import (
    PlannedAttention,
    Rows,
    device_as_current,
    numbered,
)
from deft_backend.costs.cost_model import (
    LAUNCH_NS,
    LEAVES_NS,
    MARGIN,
    STEP_NS,
    TOKEN_NS,
    latent_costs,
)
from deft_backend.forest import PrefixForest, forest_of_blocks
from deft_backend.kernels import Gpu
from deft_backend.kernels.latent import LatentKernel, LatentLaunches, LatentStep
from deft_backend.planner import Plan, PlanCapacity, plan_forest
from deft_backend.policies import Auto, Policy, Target, get_policy
from deft_backend.settings.policy_names import FLASH_DECODING
from deft_backend.shapes import LatentShape, QueryBlocks, gains_nothing

LEVELS = 3  # levels of shared nodes for which a call has room, if every request is below each

NODE_REQUESTS, FEWEST_NODES = 4, 4
"""A call has room for a node for so many requests, and for at least so many nodes. More room would
cost time in every call: the kernel looks through empty entries."""


class LatentAttention(PlannedAttention):
    """MLA of decode and verification over a batch that shares prefixes: plan, lay out, run.

    The host's own MLA kernel computes every node of the forest once, as a request of many query
    tokens, and every leaf as a request of its own. A plan says which nodes are worth it. Results
    merge by their log-sum-exp. All device memory keeps its addresses, so CUDA graphs can hold the
    launches.

    - `num_query_heads`: query heads of this rank.
    - `dtype`: of queries, KV cache and output.
    - `kernel`: the host's; on the CPU
      :func:`~deft_backend.kernels.latent.plain_latent_attention`.
    - `page_size`: tokens of a page.
    - `max_batch`: most requests of a batch.
    - `query_tokens`: of each request: 1 in decode, more in the verification of a chain of drafts.
    - `value_dim`, `rope_dim`: elements of a token's latent vector, and of the key's part with its
      position.
    - `compiled_for`: a GPU that is not at hand; launches can only be recorded, as with
      `TreeAttention`.

    `target` is the attention, the GPU and the costs that plans are made for. The constructor raises
    AttentionError if a request fills a tile of the kernel by itself.

    Examples
    --------
    Two requests share 3 tokens and hold 1 and 2 of their own:

    >>> import torch
    >>> from deft_backend import forest_from_page_tables
    >>> from deft_backend.attention import LatentAttention
    >>> from deft_backend.kernels.latent import plain_latent_attention
    >>> page_table = torch.tensor([[0, 1, 2, 3, 0], [0, 1, 2, 4, 5]], dtype=torch.int32)
    >>> seq_lens = torch.tensor([4, 5], dtype=torch.int32)
    >>> attention = LatentAttention(num_query_heads=4, dtype=torch.float32, device="cpu",
    ...                             kernel=plain_latent_attention, max_batch=2)
    >>> plan = attention.plan(forest_from_page_tables(page_table, seq_lens))
    >>> attention.lay_out(seq_lens)
    >>> q_nope, q_rope, cache = torch.randn(2, 4, 512), torch.randn(2, 4, 64), torch.randn(6, 576)
    >>> attention.run(q_nope, q_rope, cache, page_table, sm_scale=0.1).shape
    torch.Size([2, 4, 512])
    """

    def __init__(
        self,
        *,
        num_query_heads: int,
        dtype: torch.dtype,
        device: torch.device | str,
        kernel: LatentKernel,
        page_size: int = 1,
        max_batch: int = 256,
        query_tokens: int = 1,
        value_dim: int = 512,
        rope_dim: int = 64,
        compiled_for: Gpu | None = None,
    ) -> None:
        reason = gains_nothing(num_query_heads, query_tokens)
        if reason is not None:
            raise AttentionError(reason)
        device = numbered(device)
        self.shape = LatentShape(num_query_heads, dtype, device, page_size, value_dim, rope_dim)
        self.max_batch = max_batch
        self.query_tokens = query_tokens
        self._kernel = kernel
        self._blocks = QueryBlocks(query_tokens, 1, query_tokens)
        gpu = Gpu.at(device) if device.type == "cuda" else compiled_for
        sms = 1 if gpu is None else gpu.sms
        super().__init__(
            Auto(chunks="whole"),
            _target(self.shape, max_batch, query_tokens, sms),
            self._room(max_batch),
            device,
            page_size,
            overlapped=gpu is not None and gpu.capability[0] >= 9,
            interpreted=gpu is None,
        )
        self._launches = LatentLaunches(
            self.shape, self.capacity, self.arrays, sms=sms, interpreted=self.interpreted
        )
        self._laid_out: PlanCapacity | None = None

    @property
    def workspace_bytes(self) -> int:
        """Bytes of device memory that stay allocated."""
        return self._launches.num_bytes + self._plan_bytes()

    def plan(self, forest: PrefixForest, *, policy: Policy | None = None) -> Plan:
        """Plan a forest on the CPU; copy the plan to the device, on the current stream.

        A tree that needs more than a call has room for is computed request by request. `policy`
        replaces `auto`. Raises PlanError if the batch is larger than `max_batch`.
        """
        plan = self._plan_forest(forest, self._blocks, self.target, policy)
        if not self._has_room(plan, forest):
            alone = get_policy(FLASH_DECODING)
            plan = self._plan_forest(forest, self._blocks, self.target, alone)
        return plan

    def gains(self, forest: PrefixForest, num_layers: int) -> bool:
        """Whether plans of `auto` make a server of so many layers faster than the host's kernel."""
        blocks = forest_of_blocks(forest, 1, self._blocks.private_tokens)
        plan, _ = plan_forest(blocks, self.policy, self.target, self.capacity)
        return self._has_room(plan, forest) and not self.loses(plan, forest, num_layers)

    def _has_room(self, plan: Plan, forest: PrefixForest) -> bool:
        room = self._room(forest.batch_size)
        return plan.num_items <= room.max_items and len(plan.entry_query) <= room.max_entries

    def loses(self, plan: Plan, forest: PrefixForest, num_layers: int) -> bool:
        """Whether a server of so many layers is faster with the host's kernel than over a plan."""
        queries = np.diff(plan.item_query_ptr)
        tiles = -(-queries // self.shape.tile_queries(self.query_tokens))
        computed = int((tiles * plan.range_tokens(forest.seq_lens)).sum())
        saved = (forest.tokens_attended - computed) * TOKEN_NS
        spent = plan.num_partials * self.target.partial_ns + LAUNCH_NS + STEP_NS / num_layers
        if self.query_tokens > 1:
            spent += LEAVES_NS
        return bool(saved <= MARGIN * spent)

    def _blocks_of(self, query_tokens: int | None) -> QueryBlocks:
        if query_tokens not in (None, self.query_tokens):
            raise AttentionError(f"expected {self.query_tokens} query tokens, not {query_tokens}")
        return self._blocks

    def _plan_rows(self, rows: Rows, blocks: QueryBlocks, *, on_device: bool) -> None:
        seq_lens = rows[2]
        if on_device:
            limits = self._room(len(seq_lens)).limits
            self._launch_plan(rows, blocks, self.target, limits)
        else:
            self._plan_by_reference(rows, self.plan)
        self.lay_out(seq_lens)

    def lay_out(self, seq_lens: torch.Tensor, *, table_rows: torch.Tensor | None = None) -> None:
        """Write the calls of the kernel for a step; needed in each step after :meth:`plan`.

        Parameters
        ----------
        seq_lens : [B] int32 or int64
            Current tokens of each request, its query tokens included. A CUDA graph may hold more
            requests than the plan: the last ones are padding.
        table_rows : [B] int32 or int64, optional
            Row of the page table of each request; default: row ``b`` for request ``b``.
        """
        self._check_size(len(seq_lens), self._blocks)
        self._laid_out = self._room(len(seq_lens))
        with device_as_current(self.device):
            rows = self._rows_of_ranges(table_rows)
            self._launches.lay_out(self._laid_out, seq_lens, rows, self.query_tokens)

    def run(
        self,
        q_nope: torch.Tensor,
        q_rope: torch.Tensor,
        cache: torch.Tensor,
        page_table: torch.Tensor,
        *,
        sm_scale: float,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of the batch that was laid out, in one layer.

        Parameters
        ----------
        q_nope, out : [T, H, value_dim]
            Queries, request-major, in the space of the latent vectors; where the result goes.
        q_rope : [T, H, rope_dim]
            The queries' parts with positions.
        cache : [pages, page_size, value_dim + rope_dim], or [tokens, ...] if `page_size` is 1
            The layer's KV cache; dimensions of 1 for the KV head are allowed.
        page_table : [rows, P] int32
        sm_scale : float

        Raises
        ------
        AttentionError
            If nothing was laid out, or shapes, dtypes or devices do not match.
        """
        room, shape = self._laid_out, self.shape
        if room is None:
            raise AttentionError("nothing is laid out; call lay_out(seq_lens) first")
        tokens = room.max_batch * self.query_tokens
        if out is None:
            out = torch.empty(
                (tokens, shape.num_query_heads, shape.value_dim),
                dtype=shape.dtype,
                device=self.device,
            )
        for name, tensor, dim in (
            ("q_nope", q_nope, shape.value_dim),
            ("q_rope", q_rope, shape.rope_dim),
            ("out", out, shape.value_dim),
        ):
            expected = (tokens, shape.num_query_heads, dim)
            check_tensor(name, tensor, expected, shape.dtype, self.device)
        if page_table.dtype != torch.int32:
            raise AttentionError(f"page_table has dtype {page_table.dtype}; expected int32")
        cache = cache.view(-1, shape.page_size, 1, shape.latent_dim)
        check_tensor("cache", cache, tuple(cache.shape), shape.dtype, self.device)
        if tokens == 0:
            return out
        # GPUs round to bfloat16, Triton's interpreter truncates: let PyTorch convert.
        truncates = self.interpreted and shape.dtype == torch.bfloat16
        found = out.float() if truncates else out
        step = LatentStep(q_nope, q_rope, cache, page_table, found, sm_scale)
        with device_as_current(self.device):
            self._launches.run(step, room, self.query_tokens, self._kernel)
        if truncates:
            out.copy_(found)
        return out

    def _room(self, requests: int) -> PlanCapacity:
        """Items and entries of a batch of so many requests: leaves, and nodes above them."""
        items = requests + max(FEWEST_NODES, requests // NODE_REQUESTS)
        entries = max(1, (1 + LEVELS) * requests)
        return PlanCapacity(
            max_batch=requests, max_items=items, max_entries=entries, max_segments=items
        )


def _target(shape: LatentShape, max_batch: int, query_tokens: int, sms: int) -> Target:
    """Every item is a node or a leaf with all its queries: the kernel itself cuts it into tiles.

    For planners it is a large tile without limit, and costs count the whole GPU. Small tiles hold
    no query, so leaves do not merge results either.
    """
    height = max_batch * shape.num_query_heads * query_tokens
    return Target(
        shape.num_query_heads,
        1,
        shape.latent_dim,
        shape.dtype.itemsize,
        num_programs=1,
        tile_heights=(0, height, height),
        tile_programs=(1, 1, 1),
        num_sms=sms,
        query_tokens=query_tokens,
        cost_model=latent_costs(shape.num_query_heads),
    )
