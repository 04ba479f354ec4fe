"""What plans and runs need: shapes and targets, a workspace, and checks before any kernel runs."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from deft_backend.attention.current_plan import PlannedBatch
from deft_backend.costs.table_lookup import cost_model_on
from deft_backend.kernels import (
    EXPONENT_BITS,
    Gpu,
    KernelConfiguration,
    Partials,
    Step,
    kernel_configuration,
    unsupported,
)
from deft_backend.policies.target import TILE_BLOCKS, Target
from deft_backend.shapes import (
    MAX_QUERY_TOKENS,
    ONE_TOKEN,
    TILE_SEGMENTS,
    AttentionShape,
    QueryBlocks,
)

_INTEGERS = (torch.int32, torch.int64)


class AttentionError(ValueError):
    """The kernels cannot run this attention, or the tensors do not fit the plan."""


def check_attention(
    shape: AttentionShape, *, max_batch: int, query_tokens: int, gpu: Gpu | None
) -> None:
    """Raise AttentionError for an attention that the kernels cannot run on its device or `gpu`."""
    heads = (shape.num_query_heads, shape.num_kv_heads, shape.head_dim)
    reason = unsupported(*heads, shape.dtype, shape.device, gpu, kv_dtype=shape.kv_dtype)
    if reason is not None:
        raise AttentionError(f"tree attention cannot run: {reason}")
    if shape.page_size < 1:
        raise AttentionError(f"page_size is {shape.page_size}; expected at least 1 token a page")
    if max_batch < 1:
        raise AttentionError(f"max_batch is {max_batch}; expected at least 1 request")
    if not 1 <= query_tokens <= MAX_QUERY_TOKENS:
        raise AttentionError(
            f"query_tokens is {query_tokens}; expected 1 to {MAX_QUERY_TOKENS} a request"
        )


def check_step(
    shape: AttentionShape, step: Step, *, requests: int, rows: int, query_tokens: int
) -> None:
    """Raise AttentionError for the first input that does not fit; `rows` are those of `q`."""
    queries = (rows, shape.num_query_heads, shape.head_dim)
    page = (shape.page_size, shape.num_kv_heads, shape.head_dim)
    device, k_cache, v_cache = shape.device, step.k_cache, step.v_cache
    check_tensor("q", step.q, queries, shape.dtype, device)
    check_tensor("out", step.out, queries, shape.dtype, device)
    check_tensor("k_cache", k_cache, (*k_cache.shape[:1], *page), shape.kv_dtype, device)
    check_tensor("v_cache", v_cache, (*v_cache.shape[:1], *page), shape.kv_dtype, device)
    strides = zip(k_cache.shape, k_cache.stride(), v_cache.stride(), strict=True)
    if any(size > 1 and k != v for size, k, v in strides):
        raise AttentionError(
            f"v_cache has strides {v_cache.stride()}; expected those of k_cache, {k_cache.stride()}"
        )
    check_batch(step.page_table, step.seq_lens, step.table_rows, device, requests)
    _check_scales(shape, step)
    if step.sinks is not None:
        floats = (torch.float32, torch.bfloat16, torch.float16)
        check_tensor("sinks", step.sinks, (shape.num_query_heads,), floats, device)
    if step.query_start is not None:
        check_tensor("query_start", step.query_start, (requests + 1,), torch.int32, device)
    if step.ancestors is not None:  # a bit for each query token, in words of 64
        words = (requests, query_tokens, -(-query_tokens // 64))
        check_tensor("ancestors", step.ancestors, words, torch.int64, device)


def check_batch(
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    table_rows: torch.Tensor,
    device: torch.device,
    requests: int | None = None,
) -> None:
    """Raise AttentionError if these do not fit together, or not a batch of so many `requests`."""
    if page_table.dim() != 2 or page_table.stride(1) != 1:
        raise AttentionError(
            f"page_table has shape {list(page_table.shape)} and strides {page_table.stride()}; "
            "expected [rows, pages] with contiguous rows"
        )
    listed = (len(seq_lens) if requests is None else requests,)
    check_tensor("page_table", page_table, tuple(page_table.shape), _INTEGERS, device)
    check_tensor("seq_lens", seq_lens, listed, _INTEGERS, device)
    check_tensor("table_rows", table_rows, listed, _INTEGERS, device)


def _check_scales(shape: AttentionShape, step: Step) -> None:
    if not 0.0 < step.sm_scale < math.inf:
        raise AttentionError(f"sm_scale is {step.sm_scale}; expected a finite number above 0")
    eight_bits = shape.kv_dtype in EXPONENT_BITS
    for name, scale in (("k_scale", step.k_scale), ("v_scale", step.v_scale)):
        is_tensor = isinstance(scale, torch.Tensor)
        if not eight_bits and (is_tensor or scale != 1.0):
            raise AttentionError(
                f"{name} is given, but the KV cache has the dtype of the queries; only a cache of "
                "8 bits has scales: leave it out, or set kv_dtype"
            )
        if isinstance(scale, torch.Tensor):
            one = tuple(scale.shape) if scale.numel() == 1 else (1,)
            check_tensor(name, scale, one, torch.float32, shape.device)
        elif not 0.0 < scale < math.inf:
            raise AttentionError(f"{name} is {scale}; expected a number above 0")


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: tuple[int, ...],
    dtypes: torch.dtype | tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Refuse a tensor of another shape, dtype or device, or with a strided last dimension."""
    if tensor.shape != shape:
        raise AttentionError(f"{name} has shape {list(tensor.shape)}; expected {list(shape)}")
    allowed = dtypes if isinstance(dtypes, tuple) else (dtypes,)
    if tensor.dtype not in allowed:
        expected = " or ".join(map(str, allowed))
        raise AttentionError(f"{name} has dtype {tensor.dtype}; expected {expected}")
    if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise AttentionError(
            f"{name} has stride {tensor.stride(-1)} in its last dimension; expected 1: make it "
            "contiguous"
        )
    if tensor.device != device:
        raise AttentionError(f"{name} is on {tensor.device}; expected {device}")


def allocate_workspace(
    entries: int, num_query_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Partials:
    """Room for the partial results of `entries` query tokens of items, for operands of `dtype`."""
    # After division by the largest element, float16 keeps 11 bits of mantissa for any range of
    # values.
    held = torch.float32 if dtype == torch.float32 else torch.float16
    out = torch.empty((entries, num_query_heads, head_dim), dtype=held, device=device)
    lse, scale = torch.empty((2, entries, num_query_heads), dtype=torch.float32, device=device)
    return Partials(out, lse, scale)


class RunInputs:
    """Completes what the caller of :meth:`TreeAttention.run` passes, with tensors at fixed
    addresses: CUDA graphs hold them. `unit_scale` [1] float32 is the scale 1 on the device.
    """

    def __init__(self, shape: AttentionShape, max_requests: int) -> None:
        self.shape = shape
        self._own_rows = torch.arange(max_requests, dtype=torch.int32, device=shape.device)
        self.unit_scale = torch.ones(1, dtype=torch.float32, device=shape.device)

    def new_output(
        self,
        q: torch.Tensor,
        requests: int,
        query_start: torch.Tensor | None,
        planned: PlannedBatch,
        static_launch: bool,
    ) -> torch.Tensor:
        """A tensor for the output: zeros where the kernels may leave a row as it is."""
        # A CUDA graph may be replayed for fewer requests than it was captured for. Plans from page
        # tables cover padding requests. With other plans, their outputs must not be stale memory.
        covered = query_start is None and requests <= planned.requests
        covered = covered and (planned.from_rows or not static_launch)
        return torch.empty_like(q) if covered else torch.zeros_like(q)

    def first_rows(self, page_table: torch.Tensor, requests: int) -> torch.Tensor:
        """[requests] int32: row ``r`` of the page table for request ``r``."""
        if requests > min(len(page_table), len(self._own_rows)):
            raise AttentionError(
                f"{requests} requests, a page table of {len(page_table)} rows and max_batch "
                f"{len(self._own_rows)}; expected a row each, or table_rows, and a larger max_batch"
            )
        return self._own_rows[:requests]

    def paged(self, cache: torch.Tensor) -> torch.Tensor:
        """[pages, page_size, Hkv, D] view of a cache."""
        return cache.unsqueeze(1) if cache.dim() == 3 and self.shape.page_size == 1 else cache

    def put_scales_together(self, step: Step) -> None:
        """Two tensors on the device, or two plain numbers, as the kernels need them."""
        k_scale, v_scale = step.k_scale, step.v_scale
        if isinstance(k_scale, torch.Tensor) != isinstance(v_scale, torch.Tensor):
            step.k_scale = self._on_device(k_scale)
            step.v_scale = self._on_device(v_scale)

    def _on_device(self, scale: float | torch.Tensor) -> torch.Tensor:
        if isinstance(scale, torch.Tensor):
            return scale
        return self.unit_scale if scale == 1.0 else self.unit_scale * scale


def requests_to_run(planned: PlannedBatch, given: int, static_launch: bool) -> int:
    """The number of requests for a run: that of the planned batch, or a larger one that is
    given.
    """
    if static_launch:
        expected = given
    elif planned.forest is not None:
        expected = planned.forest.batch_size // planned.blocks.blocks
    else:
        raise AttentionError("nothing is planned; call plan(forest) first")
    if expected < planned.requests:
        raise AttentionError(
            f"q is for {expected} requests; the plan is for {planned.requests} requests: plan the "
            "batch that is run"
        )
    return expected


class QueryShape(NamedTuple):
    """How requests of so many query tokens are planned and run."""

    blocks: QueryBlocks
    config: KernelConfiguration
    target: Target


class QueryShapes(dict[int, QueryShape]):
    """The :class:`QueryShape` of each number of query tokens, made when it is first used.

    With `one_way`, neither tiles nor merges depend on the batch (`KernelConfiguration.one_way`).
    """

    def __init__(self, shape: AttentionShape, gpu: Gpu | None, *, one_way: bool) -> None:
        super().__init__()
        self._shape = shape
        self._gpu = gpu
        self._one_way = one_way

    def __missing__(self, query_tokens: int) -> QueryShape:
        shape = self._shape
        blocks = QueryBlocks.of(query_tokens, shape.gqa_group)
        heads = (shape.head_dim, shape.dtype, shape.device, shape.gqa_group)
        config = kernel_configuration(
            *heads, self._gpu, query_tokens=blocks.tokens, kv_dtype=shape.kv_dtype
        )
        if self._one_way:
            config = config.one_way()
        self[query_tokens] = QueryShape(blocks, config, target_of(config, shape, blocks))
        return self[query_tokens]


def target_of(
    config: KernelConfiguration, shape: AttentionShape, blocks: QueryBlocks = ONE_TOKEN
) -> Target:
    """The target of plans for kernels configured by `config`, with the costs of its device."""
    kv_heads = shape.num_kv_heads
    tile_programs = tuple(max(1, tile.programs // kv_heads) for tile in config.tiles)
    fewer = config.tiles[0].fewer_programs
    return Target(
        shape.num_query_heads,
        kv_heads,
        shape.head_dim,
        dtype_bytes=shape.kv_dtype.itemsize,
        num_programs=tile_programs[-1],
        tile_heights=tuple(tile.height for tile in config.tiles),
        tile_programs=tile_programs,
        fewer_programs=tuple(
            (most // kv_heads, max(1, count // kv_heads)) for most, count in fewer
        ),
        num_sms=config.sms,
        tile_segments=TILE_SEGMENTS,
        # The interpreter takes larger KV blocks, for speed; plans are the same on every device.
        block_tokens=min(64, config.tiles[-1].block_tokens),
        tile_blocks=(
            TILE_BLOCKS if config.interpreted else tuple(t.block_tokens for t in config.tiles)
        ),
        query_tokens=blocks.tokens,
        query_blocks=blocks.blocks,
        cost_model=cost_model_on(shape),
    )
