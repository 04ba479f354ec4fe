"""Launch shapes of the kernels: tile sizes, warps and how many persistent programs run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from triton.runtime.interpreter import InterpretedFunction

from deft_backend.kernels import partial_attention as stage1
from deft_backend.kernels import reduction as stage2
from deft_backend.planner import TILE_ROWS

HEAD_DIMS = (64, 96, 128, 256)
"""Head dimensions that the kernels are tested for."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Element types; float32 on the CPU only, where small models are served in it."""

_interpreted_stage1 = InterpretedFunction(stage1.partial_attention)
_interpreted_stage2 = InterpretedFunction(stage2.reduce_partials)


@dataclass(frozen=True)
class TileConfig:
    """How stage 1 runs one tile shape on one device."""

    rows: int
    block_tokens: int
    num_warps: int
    num_stages: int
    programs: int


@dataclass(frozen=True)
class LaunchConfig:
    """How both stages run on one device for one head shape."""

    tiles: tuple[TileConfig, ...]
    reduce_programs: int
    reduce_heads: int
    interpreted: bool

    def stage1(self) -> Any:
        return _interpreted_stage1 if self.interpreted else stage1.compiled

    def stage2(self) -> Any:
        return _interpreted_stage2 if self.interpreted else stage2.compiled


def unsupported(
    num_query_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
) -> str | None:
    """Why the kernels cannot run this attention, in one line; None if they can."""
    if num_kv_heads < 1 or num_query_heads % num_kv_heads:
        return (
            f"{num_query_heads} query heads over {num_kv_heads} KV heads; the query heads must be "
            "a multiple of the KV heads"
        )
    group = num_query_heads // num_kv_heads
    if group > TILE_ROWS[-1]:
        return f"{group} query heads share a KV head; the largest tile holds {TILE_ROWS[-1]}"
    if head_dim not in HEAD_DIMS:
        return f"head dimension {head_dim}; supported are {', '.join(map(str, HEAD_DIMS))}"
    if dtype not in DTYPES:
        names = ", ".join(str(d).removeprefix("torch.") for d in DTYPES)
        return f"dtype {str(dtype).removeprefix('torch.')}; supported are {names}"
    if device.type == "cpu":
        return None
    if device.type != "cuda" or torch.version.hip is not None:
        return f"device {device.type}; the kernels run on NVIDIA GPUs and, interpreted, on the CPU"
    if dtype == torch.float32:
        return "dtype float32 on a GPU; supported there are float16, bfloat16"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        return f"compute capability {major}.{minor}; the kernels need 8.0 (Ampere) or newer"
    return None


@lru_cache(maxsize=64)
def launch_config(head_dim: int, dtype: torch.dtype, device: torch.device) -> LaunchConfig:
    """Tile shapes for `head_dim` elements of `dtype` on `device`."""
    if device.type == "cpu":
        # The interpreter's cost is Python's, per operation and not per element: large KV tiles,
        # one program.
        tiles = tuple(TileConfig(rows, 256, 1, 1, 1) for rows in TILE_ROWS)
        return LaunchConfig(tiles, reduce_programs=1, reduce_heads=16, interpreted=True)
    properties = torch.cuda.get_device_properties(device)
    sms = properties.multi_processor_count
    shared: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    padded = triton.next_power_of_2(head_dim)
    found = []
    for rows in TILE_ROWS:
        warps = 4 if rows <= 64 else 8
        block = 64 if padded * dtype.itemsize <= 256 else 32
        stages = 3
        # Q, the K and V tiles of every stage, and the weights share the SM's memory.
        while stages > 1 and _shared_bytes(rows, block, padded, dtype, stages) > shared:
            stages -= 1
        while block > 16 and _shared_bytes(rows, block, padded, dtype, stages) > shared:
            block //= 2
        blocks_per_sm = max(1, min(4, shared // _shared_bytes(rows, block, padded, dtype, stages)))
        found.append(TileConfig(rows, block, warps, stages, sms * blocks_per_sm))
    return LaunchConfig(tuple(found), reduce_programs=sms * 16, reduce_heads=1, interpreted=False)


def _shared_bytes(rows: int, block: int, head_dim: int, dtype: torch.dtype, stages: int) -> int:
    item = dtype.itemsize
    return (rows * head_dim + 2 * stages * block * head_dim + rows * block) * item + 2048
