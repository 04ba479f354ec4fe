"""What plans and runs need: shapes and targets, a workspace, and the inputs of a run."""

from __future__ import annotations

from typing import NamedTuple

import torch

from deft_backend.attention.checks import AttentionError
from deft_backend.attention.planned_attention import PlannedBatch
from deft_backend.costs.table_lookup import cost_model_on
from deft_backend.kernels import Gpu, KernelConfiguration, Partials, Step, kernel_configuration
from deft_backend.policies.target import TILE_BLOCKS, Target
from deft_backend.shapes import ONE_TOKEN, TILE_SEGMENTS, AttentionShape, QueryBlocks


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

    def __init__(self, shape: AttentionShape) -> None:
        self.shape = shape
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
