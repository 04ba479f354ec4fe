"""Kernel configurations: tile sizes, warps and how many persistent programs run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
import triton

from deft_backend.compile.triton_kernel import Kernel
from deft_backend.kernels import reduction as stage2
from deft_backend.kernels.gpu import Gpu
from deft_backend.kernels.hopper import large_tile as hopper_large_tile
from deft_backend.kernels.hopper import masked_tile as hopper_masked_tile
from deft_backend.kernels.hopper import small_tile as hopper_small_tile
from deft_backend.kernels.hopper import versions as gluon_versions
from deft_backend.kernels.plain import partial_attention as stage1
from deft_backend.kernels.plain import small_tile
from deft_backend.planner.encoding import READ_AHEAD
from deft_backend.shapes import TILE_HEIGHTS, TILE_SEGMENTS

HEAD_DIMS = (64, 96, 128, 256)  # head dimensions that the kernels are tested for

LARGE_TILE_HEAD_DIMS = (64, 128)  # head dimensions of the large tile in Gluon

EIGHT_BITS_LIMITS = {8: (10, 168), 16: (8, None)}
"""Programs on an SM, and most registers of a thread, by the height of a small tile in Gluon that
reads a cache of 8 bits."""

FEWER_PROGRAMS = {
    (8, 16): ((2, 5), (8, 8)),
    (8, 8): ((1, 4), (2, 6), (8, 8)),
    (16, 16): ((4, 4),),
    (16, 8): ((4, 4),),
}
"""Small tiles in Gluon, by their height and the bits of an element of the cache: up to so many
queries times KV heads for each SM, so many programs on each SM.

A launch that does not know its number of items has programs without one. The GPU places all
programs of a launch evenly, but not the first ones of them. On an H100, up to six of the first 512
of 1,320 programs share an SM, and other SMs have three. With fewer programs, the first ones are
more even (docs/kernel-log.md)."""

ORDERED_PROGRAMS, ORDERED_FROM = 3, 16
"""Programs of the ordered tile on an SM, and the smallest batch that has its items. Its blocks have
64 tokens, so three programs fill the SM's memory."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Element types. The kernels run float32 on the CPU only, for small models."""

EXPONENT_BITS = {torch.float8_e4m3fn: 4, torch.float8_e5m2: 5}
"""Element types of a KV cache of 8 bits, and the bits of their exponents."""

PARTIAL_ATTENTION = Kernel(stage1, "partial_attention")
SMALL_TILE = Kernel(small_tile, "small_tile_attention")
HOPPER_SMALL_TILE = Kernel(hopper_small_tile, "hopper_small_tile_attention")
HOPPER_LARGE_TILE = Kernel(hopper_large_tile, "hopper_large_tile_attention")
HOPPER_MASKED_TILE = Kernel(hopper_masked_tile, "hopper_masked_tile_attention")
REDUCE_PARTIALS = Kernel(stage2, "reduce_partials")


@dataclass(frozen=True)
class TileConfig:
    """How stage 1 runs one tile shape on one device."""

    height: int
    block_tokens: int
    block_segments: int
    num_warps: int
    num_stages: int
    programs: int
    lookahead: int = 0  # blocks that the kernel in Gluon copies ahead; 0: the plain kernel
    max_registers: int | None = None
    """Most registers that the assembler may give a thread; None: as many as it chooses."""
    programs_for_one_tile: int | None = None
    """Programs if the query vectors of the whole batch fit one tile; None: `programs`."""
    spread: bool = False  # whether few items are spread over SMs (`hopper/large_tile_memory.py`)
    fewer_programs: tuple[tuple[int, int], ...] = ()
    """Programs of a small batch: the most queries times KV heads, and the programs, ascending."""
    fewest_queries: int = 0  # the smallest batch whose plans may have items of this tile
    waves: int = 1
    """How often a launch has the programs that the planner counts on. With two waves, the GPU deals
    the second one to the SMs that end first (docs/kernel-log.md)."""

    def programs_for(self, queries: int, num_kv_heads: int) -> int:
        """Programs of a launch that does not know how many items it has."""
        pairs = queries * num_kv_heads
        fewer = next((n for most, n in self.fewer_programs if pairs <= most), self.programs)
        return self.waves * fewer


@dataclass(frozen=True)
class ReduceConfig:
    """How stage 2 runs: partial results and heads that a program takes at a time."""

    partials: int
    heads: int
    num_warps: int
    programs: int

    def blocks(self, num_heads: int) -> int:
        """Programs that one query of `num_heads` heads has work for."""
        return -(-num_heads // self.heads)


@dataclass(frozen=True)
class KernelConfiguration:
    """How both stages run on one device for one head shape.

    Stage 2 runs as `few` says if that gives each program at most one block of heads of one query:
    few queries have many partial results each. `overlapped` launches use programmatic dependent
    launch (NVIDIA Hopper and newer): a kernel starts while the kernel before it still runs. `sms`
    is the GPU's number of SMs, 1 for the interpreter.
    """

    tiles: tuple[TileConfig, ...]
    reduce: ReduceConfig
    few: ReduceConfig
    sms: int
    overlapped: bool
    interpreted: bool
    fixed_tiles: bool = False
    """Whether the number of queries does not tell which tile shapes a plan may need."""

    def __hash__(self) -> int:
        """A cheap one: each launch looks its configuration up."""
        return hash((self.sms, self.overlapped, self.tiles[0].height, self.tiles[0].programs))

    def one_way(self, *, decode: bool) -> KernelConfiguration:
        """The configuration for plans of `invariant`.

        It has the ordered tile where a GPU has shown its bits: in `decode`, of one query token.
        Small batches may have items of the large tile, too, and stage 2 merges as `few` says in
        every batch. So the bits of a query's output do not depend on the queries around it.
        """
        small, large, *others = self.tiles
        tiles = [small, replace(large, programs_for_one_tile=None), *others]
        # Tiles in Gluon, of a cache of 16 bits.
        on_hopper = small.lookahead > 0 and small.block_tokens == 16 and large.lookahead > 0
        on_hopper = on_hopper and triton.__version__.startswith(gluon_versions.EQUAL_BITS)
        if decode and small.height == 8 and (on_hopper or self.interpreted):
            ordered = replace(small, fewer_programs=(), fewest_queries=ORDERED_FROM)
            if on_hopper:
                programs = ORDERED_PROGRAMS * self.sms
                ordered = replace(ordered, block_tokens=64, programs=programs, max_registers=None)
            tiles.append(ordered)
        return replace(self, tiles=tuple(tiles), reduce=self.few, fixed_tiles=True)

    def few_queries(self, num_heads: int) -> int:
        """Most queries of `num_heads` heads whose results stage 2 merges as `few` says."""
        return self.few.programs // self.few.blocks(num_heads)


def unsupported(
    num_query_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    gpu: Gpu | None = None,
    *,
    kv_dtype: torch.dtype | None = None,
) -> str | None:
    """Why the kernels cannot run this attention on `device` or `gpu`, in one line, or None."""
    if num_kv_heads < 1 or num_query_heads < 1 or num_query_heads % num_kv_heads:
        return (
            f"{num_query_heads} query heads over {num_kv_heads} KV heads; the query heads must be "
            "a multiple of the KV heads"
        )
    group = num_query_heads // num_kv_heads
    if group > TILE_HEIGHTS[-1]:
        return f"{group} query heads share a KV head; a tile holds {TILE_HEIGHTS[-1]}"
    if head_dim not in HEAD_DIMS:
        return f"head dimension {head_dim}; supported are {', '.join(map(str, HEAD_DIMS))}"
    if dtype not in DTYPES:
        return f"dtype {_name(dtype)}; supported are {', '.join(map(_name, DTYPES))}"
    if kv_dtype not in (None, dtype, *EXPONENT_BITS):
        eight = ", ".join(map(_name, EXPONENT_BITS))
        return (
            f"a KV cache of {_name(kv_dtype)} under queries of {_name(dtype)}; supported are "
            f"{_name(dtype)}, {eight}"
        )
    if device.type == "cpu" and gpu is None:
        return None
    if (device.type != "cuda" and gpu is None) or torch.version.hip is not None:
        return f"device {device.type}; the kernels run on NVIDIA GPUs and, interpreted, on the CPU"
    if dtype == torch.float32:
        return "dtype float32 on a GPU; supported there are float16, bfloat16"
    major, minor = torch.cuda.get_device_capability(device) if gpu is None else gpu.capability
    if major < 8:
        return f"compute capability {major}.{minor}; the kernels need 8.0 (Ampere) or newer"
    return None


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


@lru_cache(maxsize=64)
def kernel_configuration(
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    gqa_group: int = 1,
    gpu: Gpu | None = None,
    *,
    query_tokens: int = 1,
    kv_dtype: torch.dtype | None = None,
) -> KernelConfiguration:
    """Tile shapes for `head_dim` elements of `dtype` on `device`, or on `gpu`.

    A query of the plan has `query_tokens` query tokens of `gqa_group` query vectors that share a KV
    head. `kv_dtype` is the dtype of the KV cache, if it is another one.
    """
    # The small tile holds at least one query's vectors, and at least 8 query vectors: the tensor
    # cores multiply no fewer.
    vectors = gqa_group * query_tokens
    small_height = min(32, max(TILE_HEIGHTS[0], triton.next_power_of_2(vectors)))
    tile_heights = (small_height, *TILE_HEIGHTS[1:])
    if device.type == "cpu" and gpu is None:
        # The interpreter's time is Python's, for each operation and not for each element. So it
        # runs one program with large blocks. Stage 2 merges few at once: tests see it loop.
        interpreted = tuple(
            TileConfig(height, 256, segments, 1, 1, 1)
            for height, segments in zip(tile_heights, TILE_SEGMENTS, strict=True)
        )
        reduce = ReduceConfig(8, 16, 1, 1)
        return KernelConfiguration(
            interpreted, reduce, few=reduce, sms=1, overlapped=False, interpreted=True
        )
    gpu = gpu or Gpu.at(device)
    sms = gpu.sms
    hopper = gpu.capability == (9, 0) and gluon_versions.available()
    eight_bits = kv_dtype in EXPONENT_BITS
    by_gluon = hopper and query_tokens > 1 and head_dim in LARGE_TILE_HEAD_DIMS
    if by_gluon and small_height > 16:
        # The large tile in Gluon reads private KV faster than the plain small tile of 32 vectors.
        tile_heights = (16, *TILE_HEIGHTS[1:])
    found = []
    for height, segments in zip(tile_heights, TILE_SEGMENTS, strict=True):
        dim, stored = triton.next_power_of_2(head_dim), kv_dtype or dtype
        plain = _plain_tile(height, segments, dim, dtype, stored, gpu, trees=query_tokens > 1)
        if height < 64 and not hopper:
            plain = replace(plain, waves=2)
        gluon = _gluon_tile(plain, head_dim, vectors, sms, eight_bits) if hopper else None
        found.append(gluon or plain)
    return KernelConfiguration(
        tuple(found),
        reduce=ReduceConfig(partials=4, heads=2, num_warps=1, programs=sms * 32),
        few=ReduceConfig(partials=32, heads=1, num_warps=1, programs=sms * 8),
        sms=sms,
        overlapped=gpu.capability[0] >= 9,
        interpreted=False,
    )


def _gluon_tile(
    plain: TileConfig, head_dim: int, vectors: int, sms: int, eight_bits: bool
) -> TileConfig | None:
    """How the kernels in Gluon run a tile shape on Hopper; None: the plain kernel runs it."""
    height, bits = plain.height, 8 if eight_bits else 16
    if height == 64 and head_dim in LARGE_TILE_HEAD_DIMS:
        # A program reads its first item before it knows whether there is one.
        programs = min(2 * sms, READ_AHEAD)
        lookahead = 2 if head_dim == 128 and not eight_bits else 3
        tile = replace(plain, block_tokens=64, lookahead=lookahead, programs=programs)
        if not eight_bits:
            return tile
        # The conversion of bytes needs two programs on each SM, also if the batch fits one tile.
        # Two items on one SM are slow while other SMs are idle, so `spread` fills idle SMs first.
        return replace(tile, programs_for_one_tile=None, spread=plain.block_segments == 1)
    if height not in (8, 16) or head_dim != 128:
        return None
    per_sm, registers = 8, None
    if eight_bits:
        per_sm, registers = EIGHT_BITS_LIMITS[height]
    elif height == 8:
        per_sm, registers = gluon_versions.small_tile_limits(vectors)
    # One warp a program, as in the plain kernel. As many bytes are on their way with 8 bits.
    return replace(
        plain,
        block_tokens=256 // bits,
        lookahead=1,
        programs=per_sm * sms,
        max_registers=registers,
        fewer_programs=tuple(
            (pairs * sms, fewer * sms)
            for pairs, fewer in FEWER_PROGRAMS[height, bits]
            if fewer < per_sm
        ),
    )


def _plain_tile(
    height: int,
    segments: int,
    head_dim: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    gpu: Gpu,
    *,
    trees: bool,
) -> TileConfig:
    """How the plain kernels run a tile shape; with `trees`, query tokens may form them."""

    def per_sm(block: int, stages: int) -> int:
        """Programs that an SM's shared memory holds, as Triton allocates it."""
        ahead = max(1, stages - 1)
        keys = 2 * block * head_dim  # and values
        taken = height * head_dim * dtype.itemsize + ahead * keys * kv_dtype.itemsize
        if height >= 64 and gpu.capability[0] in (9, 10):
            taken += keys * dtype.itemsize  # these tensor cores read the block from shared memory
        else:
            taken += height * block * dtype.itemsize  # the weights
        if segments > 1:  # positions of segments, and the bits of trees
            taken += 1152 + (8 * ahead * height * block if trees else 0)
        taken += 64  # barriers
        return gpu.shared_per_sm // (taken + 1024) if taken <= gpu.shared_per_program else 0

    if height < 64:
        # An item is a chain of dependent loads; only the loads of other items hide it. So a
        # program is one warp, which meets no barrier, and an SM holds as many as fit.
        most = 8 if head_dim <= 128 else 4  # with heads of 256, six are slower on Hopper
        programs = gpu.sms * max(1, min(most, per_sm(16, 3)))
        # Of the largest tile, such an SM holds one or two programs, and one warp spills.
        few = height == 32 and head_dim > 128 and gpu.shared_per_program < 128 * 1024
        return TileConfig(height, 16, segments, 4 if few else 1, 3, programs)
    block = 64 if head_dim * dtype.itemsize <= 256 else 32
    if segments > 1 and gpu.shared_per_program < 128 * 1024:
        block = 32  # 64 spill
    # The softmax of one program hides behind the products of another. So two programs with fewer
    # blocks on their way are faster than one with more.
    stages = next((n for n, programs in ((3, 2), (2, 1)) if per_sm(block, n) >= programs), 1)
    # If the batch fits one tile, each node is one item. One program on each SM then uses the
    # memory's whole bandwidth. With two programs, the GPU would place the first ones, which
    # have the items, in pairs (docs/kernel-log.md).
    programs = gpu.sms * max(1, min(2, per_sm(block, stages)))
    return TileConfig(height, block, segments, 4, stages, programs, programs_for_one_tile=gpu.sms)
