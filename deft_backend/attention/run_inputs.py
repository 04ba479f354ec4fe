"""What plans and runs need: shapes and targets, and the inputs of a run."""

from __future__ import annotations

from typing import NamedTuple

import torch

from deft_backend.costs.table_lookup import cost_model_on
from deft_backend.kernels import Gpu, KernelConfiguration, Step, kernel_configuration
from deft_backend.policies.target import TILE_BLOCKS, Target
from deft_backend.shapes import ONE_TOKEN, ORDERED, AttentionShape, QueryBlocks


def paged(cache: torch.Tensor, page_size: int) -> torch.Tensor:
    """[pages, page_size, Hkv, D] view of a cache."""
    return cache.unsqueeze(1) if cache.dim() == 3 and page_size == 1 else cache


def put_scales_together(step: Step, unit_scale: torch.Tensor) -> None:
    """Make scales two tensors on the device, or two plain numbers, as the kernels need them."""

    def on_device(scale: float | torch.Tensor) -> torch.Tensor:
        if isinstance(scale, torch.Tensor):
            return scale
        return unit_scale if scale == 1.0 else unit_scale * scale

    if isinstance(step.k_scale, torch.Tensor) != isinstance(step.v_scale, torch.Tensor):
        step.k_scale, step.v_scale = on_device(step.k_scale), on_device(step.v_scale)


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
            config = config.one_way(decode=query_tokens == 1)
        self[query_tokens] = QueryShape(blocks, config, target_of(config, shape, blocks))
        return self[query_tokens]


def target_of(
    config: KernelConfiguration, shape: AttentionShape, blocks: QueryBlocks = ONE_TOKEN
) -> Target:
    """The target of plans for kernels configured by `config`, with the costs of its device."""
    kv_heads, tiles, ordered = shape.num_kv_heads, config.tiles[:ORDERED], config.tiles[ORDERED:]
    tile_programs = tuple(max(1, tile.programs // kv_heads) for tile in tiles)
    fewer = config.tiles[0].fewer_programs
    return Target(
        shape.num_query_heads,
        kv_heads,
        shape.head_dim,
        dtype_bytes=shape.kv_dtype.itemsize,
        num_programs=tile_programs[-1],
        tile_heights=tuple(tile.height for tile in tiles),
        tile_programs=tile_programs,
        fewer_programs=tuple(
            (most // kv_heads, max(1, count // kv_heads)) for most, count in fewer
        ),
        num_sms=config.sms,
        # The interpreter takes larger KV blocks, for speed; plans are the same on every device.
        block_tokens=min(64, tiles[-1].block_tokens),
        tile_blocks=(TILE_BLOCKS if config.interpreted else tuple(t.block_tokens for t in tiles)),
        ordered_height=sum(tile.height for tile in ordered),
        ordered_from=sum(tile.fewest_queries for tile in ordered),
        query_tokens=blocks.tokens,
        query_blocks=blocks.blocks,
        cost_model=cost_model_on(shape),
    )
