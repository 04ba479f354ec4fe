"""The target of plans, from the attention's shape and its kernel configuration."""

from __future__ import annotations

import torch

from deft_backend.costs.device_tables import cost_model_on
from deft_backend.kernel_limits import TILE_SEGMENTS
from deft_backend.kernels import KernelConfiguration
from deft_backend.policies import Target
from deft_backend.query_blocks import ONE_TOKEN, QueryBlocks


def target_of(
    config: KernelConfiguration,
    *,
    num_query_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    page_size: int,
    blocks: QueryBlocks = ONE_TOKEN,
) -> Target:
    """The target of plans for kernels configured by `config`, with the costs of `device`.

    `blocks` are the query blocks of a request.
    """
    tile_programs = tuple(max(1, tile.programs // num_kv_heads) for tile in config.tiles)
    return Target(
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype_bytes=dtype.itemsize,
        num_programs=tile_programs[-1],
        tile_heights=tuple(tile.height for tile in config.tiles),
        tile_programs=tile_programs,
        num_sms=config.sms,
        tile_segments=TILE_SEGMENTS,
        # The interpreter takes larger KV blocks, for speed; plans are the same on every device.
        block_tokens=min(64, config.tiles[-1].block_tokens),
        query_tokens=blocks.tokens,
        query_blocks=blocks.blocks,
        cost_model=cost_model_on(device, num_query_heads, num_kv_heads, head_dim, dtype, page_size),
    )
