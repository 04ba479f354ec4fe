"""MLA: the host's own kernel is stage 1, called with one entry for each item of a plan.

A step is laid out once; then each layer gathers queries, calls the kernel and merges its results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch

from deft_backend.compile import variants
from deft_backend.compile.triton_kernel import Kernel
from deft_backend.kernels import latent_kernels
from deft_backend.kernels.latent_kernels import KernelBatch, Merges
from deft_backend.planner import DevicePlan, PlanCapacity
from deft_backend.shapes import LatentShape


class LatentCall(NamedTuple):
    q_nope: torch.Tensor  # [T, H, value_dim]
    q_rope: torch.Tensor  # [T, H, rope_dim]
    cache: torch.Tensor  # [pages, page_size, 1, value_dim + rope_dim]
    page_table: torch.Tensor  # [rows, P] int32
    batch: KernelBatch
    max_query_tokens: int  # most query tokens of an entry
    sm_scale: float
    # Whether an entry's query tokens are the last of its KV range, and see none after themselves.
    causal: bool
    most_splits: int  # most parts into which the kernel may split a KV range


LatentKernel = Callable[[LatentCall], tuple[torch.Tensor, torch.Tensor]]
"""The host's kernel for multi-head latent attention: the attention [T, H, value_dim], and its
log-sum-exps [H, T] float32, in base e."""

LAY_OUT = Kernel(latent_kernels, "lay_out")
GATHER_QUERIES = Kernel(latent_kernels, "gather_queries")
MERGE_RESULTS = Kernel(latent_kernels, "merge_results")

_BLOCK = 128
_HEADS = 4  # heads of a program: 4 KiB of latent queries
_TILES_PER_SM = 2  # parts of KV ranges that the kernel may split a batch into, for each SM


@dataclass(frozen=True)
class LatentStep:
    """The tensors of one layer's MLA; see :meth:`deft_backend.attention.LatentAttention.run`."""

    q_nope: torch.Tensor
    q_rope: torch.Tensor
    cache: torch.Tensor
    page_table: torch.Tensor
    out: torch.Tensor
    sm_scale: float


class LatentLaunches:
    """The launches for batches up to `capacity`, and the calls' arrays on the device, at addresses
    that graphs of all batch sizes share.
    """

    def __init__(
        self,
        shape: LatentShape,
        capacity: PlanCapacity,
        plan: DevicePlan,
        *,
        sms: int,
        interpreted: bool,
    ) -> None:
        self._shape = shape
        self._slots = capacity.max_entries
        self._plan = plan
        self._sms = sms
        self._interpreted = interpreted

        def array(length: int) -> torch.Tensor:
            return torch.zeros(length, dtype=torch.int32, device=shape.device)

        most = capacity.max_items
        self._batch = KernelBatch(array(most + 1), array(most), array(most), array(most))
        requests = capacity.max_batch
        leaves = [array(requests) for _ in range(3)]
        starts = torch.arange(requests + 1, dtype=torch.int32, device=shape.device)
        self._leaves = KernelBatch(starts, *leaves)
        self._merges = Merges(
            array(capacity.max_entries),
            array(1),
            array(requests),
            array(requests),
            array(capacity.max_entries + requests),
        )

    @property
    def num_bytes(self) -> int:
        held = (*self._batch, *self._leaves, *self._merges)
        return sum(int(tensor.nbytes) for tensor in held)

    def lay_out(
        self,
        room: PlanCapacity,
        seq_lens: torch.Tensor,
        table_rows: torch.Tensor,
        query_tokens: int,
    ) -> None:
        """Write the calls of a batch; `room` is the capacity for its number of requests, and
        `table_rows` [segments] are the page table's rows of the plan's KV ranges.
        """
        lanes = max(room.max_items + 1, room.max_entries, room.max_batch)
        calls = (tuple(self._batch), tuple(self._leaves), tuple(self._merges))
        sizes = (room.max_batch, room.max_items, room.max_entries, self._slots)
        plan = (self._plan.stage1, self._plan.stage2)
        arguments = (*plan, table_rows, seq_lens, *calls, *sizes)
        constants = {"APART": query_tokens > 1, "TOKENS": query_tokens, "BLOCK": _BLOCK}
        types = (seq_lens.dtype,)
        aligned = (table_rows.data_ptr() | seq_lens.data_ptr()) % 16 == 0
        self._launch(LAY_OUT, (-(-lanes // _BLOCK),), arguments, constants, types, aligned)

    def run(
        self, step: LatentStep, room: PlanCapacity, query_tokens: int, kernel: LatentKernel
    ) -> None:
        """Compute one layer's attention of the batch that was laid out, or record the launches."""
        if variants.recorder is not None:
            kernel = _room_for_results
        shape, apart = self._shape, query_tokens > 1
        heads = shape.num_query_heads
        rows = room.max_entries * query_tokens
        nope = step.q_nope.new_empty((rows, heads, shape.value_dim))
        rope = step.q_rope.new_empty((rows, heads, shape.rope_dim))
        by_head = -(-heads // _HEADS)
        constants = {
            "HEADS": heads,
            "TOKENS": query_tokens,
            "VALUE_DIM": shape.value_dim,
            "ROPE_DIM": shape.rope_dim,
            "BLOCK_H": _HEADS,
            "APART": apart,
        }
        merges = tuple(self._merges)
        aligned = (step.q_nope.data_ptr() | step.q_rope.data_ptr() | step.out.data_ptr()) % 16 == 0
        strides = (*step.q_nope.stride()[:2], *step.q_rope.stride()[:2])
        gathered = (step.q_nope, step.q_rope, nope, rope, merges, *strides)
        self._launch(GATHER_QUERIES, (rows, by_head), gathered, constants, (), aligned)
        call = LatentCall(
            nope,
            rope,
            step.cache,
            step.page_table,
            _first(self._batch, room.max_items),
            room.max_batch * query_tokens,
            step.sm_scale,
            causal=False,
            most_splits=self._splits(room.max_batch, query_tokens),
        )
        out, lse = kernel(call)
        leaf_out, leaf_lse = out, lse
        if apart:
            leaves = _first(self._leaves, room.max_batch)
            leaves = leaves._replace(query_start=leaves.query_start * query_tokens)
            call = call._replace(q_nope=step.q_nope, q_rope=step.q_rope, batch=leaves, causal=True)
            leaf_out, leaf_lse = kernel(call._replace(max_query_tokens=query_tokens))
        rows_of = (lse.shape[1], leaf_lse.shape[1], *step.out.stride()[:2])
        merged = (out, lse, leaf_out, leaf_lse, step.out, merges, *rows_of)
        grid = (room.max_batch * query_tokens, by_head)
        self._launch(MERGE_RESULTS, grid, merged, constants, (), aligned)

    def _splits(self, requests: int, query_tokens: int) -> int:
        """As many as fill the GPU if all requests share one node: memory for results is limited."""
        tiles = -(-requests // max(1, self._shape.tile_queries(query_tokens)))
        return min(128, max(8, _TILES_PER_SM * self._sms // tiles))

    def _launch(
        self,
        kernel: Kernel,
        grid: tuple[int, ...],
        arguments: tuple[object, ...],
        constants: Mapping[str, object],
        types: tuple[object, ...],
        aligned: bool,
    ) -> None:
        chosen = {name: constants[name] for name in kernel.constants}
        kernel.launch(
            grid,
            arguments,
            chosen,
            variant=(self._shape, types, tuple(chosen.values()), *_kinds(arguments)),
            aligned=aligned,
            interpreted=self._interpreted,
            num_warps=4,
        )


def _room_for_results(call: LatentCall) -> tuple[torch.Tensor, torch.Tensor]:
    """The tensors of a result, without a result."""
    tokens, heads, _ = call.q_nope.shape
    lse = torch.empty((heads, tokens), dtype=torch.float32, device=call.q_nope.device)
    return torch.empty_like(call.q_nope), lse


def _first(batch: KernelBatch, entries: int) -> KernelBatch:
    return KernelBatch(batch.query_start[: entries + 1], *(part[:entries] for part in batch[1:]))


def _kinds(arguments: tuple[object, ...]) -> tuple[int, ...]:
    """Which of the plain integers Triton passes as 64 bits; it compiles for that."""
    return tuple(
        index
        for index, value in enumerate(arguments)
        if isinstance(value, int) and value >= 1 << 31
    )


def plain_latent_attention(call: LatentCall) -> tuple[torch.Tensor, torch.Tensor]:
    """The host's kernel in plain PyTorch, for tests and for the CPU. Rows of no entry hold NaN."""
    tokens, heads, value_dim = call.q_nope.shape
    # Contiguous, as the hosts' kernels return it, whatever the queries' strides.
    out = torch.full_like(call.q_nope, float("nan"), memory_format=torch.contiguous_format)
    lse = torch.full((heads, tokens), float("nan"), dtype=torch.float32, device=out.device)
    q = torch.cat([call.q_nope, call.q_rope], dim=-1).float()
    latents = call.cache.reshape(-1, call.cache.shape[-1])
    page_size = call.cache.shape[1]
    start, rows, begin, end = (part.tolist() for part in call.batch)
    for i, row in enumerate(rows):
        first, stop = start[i], start[i + 1]
        if first == stop:
            continue
        position = torch.arange(begin[i], end[i], device=out.device)
        page = call.page_table[row, position // page_size].long()
        kv = latents[page * page_size + position % page_size].float()
        scores = torch.einsum("thd,kd->htk", q[first:stop], kv) * call.sm_scale
        if call.causal:
            last = end[i] - (stop - first) + torch.arange(stop - first, device=out.device)
            scores.masked_fill_(position[None, None, :] > last[None, :, None], float("-inf"))
        sums = torch.logsumexp(scores, dim=-1)
        lse[:, first:stop] = sums
        weights = torch.exp(scores - sums.where(sums.isfinite(), 0.0)[..., None])
        found = torch.einsum("htk,kd->thd", weights, kv[:, :value_dim])
        out[first:stop] = found.to(out.dtype)
    return out, lse
