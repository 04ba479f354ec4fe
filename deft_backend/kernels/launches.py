"""The launches of both stages: which kernel each kind of attention takes, and its constants."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
import triton

from deft_backend.compile.triton_kernel import Kernel, Runner
from deft_backend.kernels.arguments import CacheLayout, Heads, Mode, Tile
from deft_backend.kernels.configurations import (
    HOPPER_LARGE_TILE,
    HOPPER_MASKED_TILE,
    HOPPER_SMALL_TILE,
    PARTIAL_ATTENTION,
    REDUCE_PARTIALS,
    SMALL_TILE,
    KernelConfiguration,
    ReduceConfig,
)
from deft_backend.planner.encoding import ITEM_ORDER
from deft_backend.shapes import MAX_MERGED, ORDERED, QueryBlocks


class Kind(NamedTuple):
    """What decides the kernels' constants, for a kernel configuration."""

    dtype: torch.dtype
    heads: Heads
    cache: CacheLayout
    soft_cap: bool
    #: Whether pointers, and rows of queries and outputs, are multiples of 16 bytes, and all tensors
    #: lie within WIDE_REACH.
    wide_rows: bool
    sinks: bool
    device_scales: bool


@cache
def heads_of(
    num_heads: int, num_kv_heads: int, head_dim: int, blocks: QueryBlocks, ragged: bool, tree: bool
) -> Heads:
    """The constants of the head shape and the query tokens."""
    group = num_heads // num_kv_heads
    return Heads(
        num_kv=num_kv_heads,
        group=group,
        dim=head_dim,
        padded_dim=triton.next_power_of_2(head_dim),
        single=blocks.query_tokens == 1 and not ragged and not tree,
        query_tokens=blocks.query_tokens,
        blocks=blocks.blocks,
        tokens=blocks.tokens,
        vectors=blocks.tokens * group,
        ragged=ragged,
        tree=tree,
    )


@dataclass(frozen=True, eq=False)
class Launch:
    """A kernel as it is compiled and launched for one kind.

    Each kind has one `Launch`. Its identity stands for its constants and options when `Kernel`
    looks up a compiled variant.
    """

    kernel: Kernel
    constants: dict[str, Any]
    options: dict[str, int]  # how Triton compiles it, besides its constants
    interpreted: bool

    def run(
        self, programs: int, arguments: tuple[Any, ...], types: tuple[Any, ...], aligned: bool
    ) -> None:
        """Launch it; `types` is what Triton compiles it for, besides its constants."""
        self.kernel.launch(
            programs,
            arguments,
            self.constants,
            variant=(self, types),
            aligned=aligned,
            interpreted=self.interpreted,
            **self.options,
        )

    def runner(self, programs: int, types: tuple[Any, ...]) -> Runner | None:
        """What repeats an aligned launch for other addresses; None if Triton has to look at it."""
        return self.kernel.runner(programs, variant=(self, types))


class Launches(NamedTuple):
    """Every launch that a plan may need.

    ``stage1`` holds two launches for each tile shape: as the first of an attention, and as one that
    may begin before the launch ahead of it has ended. ``stage2`` is for many queries and for few.
    """

    stage1: tuple[tuple[Launch, Launch], ...]
    stage2: tuple[Launch, Launch]


@cache
def launches_of(config: KernelConfiguration, kind: Kind) -> Launches:
    """Cached for each kind: every layer of every step asks for its launches."""
    shapes = range(len(config.tiles))
    return Launches(
        tuple((_stage1(config, kind, s, False), _stage1(config, kind, s, True)) for s in shapes),
        (_stage2(config, kind, config.reduce), _stage2(config, kind, config.few)),
    )


def _stage1(config: KernelConfiguration, kind: Kind, shape: int, follows: bool) -> Launch:
    tile = config.tiles[shape]
    # The kernels in Gluon read 16 bytes at a time.
    cache = kind.cache
    unit = 16 if cache.exponent_bits else 8
    wide = kind.wide_rows and (cache.page | cache.token | cache.head) % unit == 0
    plain, pipelined = (
        (SMALL_TILE, HOPPER_SMALL_TILE),
        (PARTIAL_ATTENTION, HOPPER_LARGE_TILE),
        (PARTIAL_ATTENTION, HOPPER_MASKED_TILE),
        (PARTIAL_ATTENTION, HOPPER_SMALL_TILE),
    )[shape]
    kernel = pipelined if tile.lookahead and wide else plain
    if shape == ORDERED and kernel is plain:
        tile = config.tiles[1]  # the kernel whose bits the tile must have
    constants = {
        "HEADS": kind.heads,
        "CACHE": cache,
        "TILE": Tile(
            place=ITEM_ORDER.index(shape),
            height=tile.height,
            block_tokens=tile.block_tokens,
            block_segments=tile.block_segments,
            lookahead=tile.lookahead,
            max_merged=MAX_MERGED,
            ordered=shape == ORDERED,
            spread=tile.spread,
        ),
        "MODE": Mode(
            soft_cap=kind.soft_cap,
            upcast=config.interpreted,
            overlapped=config.overlapped,
            sinks=kind.sinks,
            device_scales=kind.device_scales,
        ),
    }
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "launch_pdl": follows}
    if tile.max_registers is not None:
        options["maxnreg"] = tile.max_registers
    return Launch(kernel, _in_order(kernel, constants), options, config.interpreted)


def _stage2(config: KernelConfiguration, kind: Kind, reduce: ReduceConfig) -> Launch:
    constants = {
        "HEADS": kind.heads,
        "BLOCK_P": reduce.partials,
        "BLOCK_H": reduce.heads,
        "OVERLAPPED": config.overlapped,
        "SINKS": kind.sinks,
        "SPREAD": any(tile.spread for tile in config.tiles),
    }
    options = {"num_warps": reduce.num_warps, "num_stages": 3, "launch_pdl": config.overlapped}
    constants = _in_order(REDUCE_PARTIALS, constants)
    return Launch(REDUCE_PARTIALS, constants, options, config.interpreted)


def _in_order(kernel: Kernel, constants: dict[str, Any]) -> dict[str, Any]:
    """A kernel's constants in the order of its parameters, as the fast path passes them."""
    return {name: constants[name] for name in kernel.constants}
