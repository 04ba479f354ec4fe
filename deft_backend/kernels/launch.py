"""Launch shapes of the kernels: tile sizes, warps and how many persistent programs run."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
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


class Kernel:
    """A kernel, compiled for the GPU or interpreted on the CPU.

    Triton analyses every argument of every launch to find the variant to run, which takes longer
    than a short kernel does. Layers of a model differ in nothing that it looks for: a launch whose
    `variant` was seen before, with every pointer aligned as usual, goes to that variant directly.
    """

    def __init__(self, function: Any, compiled: Any) -> None:
        self._compiled = compiled
        self._interpreted = InterpretedFunction(function)
        self._variants: dict[Hashable, Any] = {}

    def launch(
        self,
        programs: int,
        arguments: Sequence[Any],
        constants: Mapping[str, Any],
        *,
        variant: Hashable,
        aligned: bool,
        interpreted: bool,
        **options: int,
    ) -> None:
        """Run `programs` programs.

        Parameters
        ----------
        arguments, constants
            In the order of the kernel's signature; constants are its constexprs.
        variant : hashable
            Everything that decides how the kernel is compiled: device, dtypes, integers, constants.
        aligned : bool
            Whether every pointer is a multiple of 16 bytes.
        options
            ``num_warps`` and ``num_stages``.
        """
        grid = (programs, 1, 1)
        if interpreted:
            self._interpreted[grid](*arguments, **constants)
            return
        known = self._variants.get(variant) if aligned else None
        if known is not None:
            known[grid](*arguments, *constants.values())
            return
        found = self._compiled[grid](*arguments, **constants, **options)
        if aligned:
            self._variants[variant] = found


PARTIAL_ATTENTION = Kernel(stage1.partial_attention, stage1.compiled)
REDUCE_PARTIALS = Kernel(stage2.reduce_partials, stage2.compiled)


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
