"""Kernel configurations of GPUs that are not at hand, as the kernels were measured or compiled."""

import re
from dataclasses import replace

import pytest
import torch
import triton

from deft_backend.kernels import Gpu
from deft_backend.kernels.configurations import (
    KernelConfiguration,
    ReduceConfig,
    kernel_configuration,
    unsupported,
)
from deft_backend.kernels.hopper import versions

CPU, E4M3 = torch.device("cpu"), torch.float8_e4m3fn
BFLOAT16, FLOAT32 = torch.bfloat16, torch.float32

SHARED = {
    "sm_80": (164, 163),
    "sm_86": (100, 99),
    "sm_87": (164, 163),
    "sm_89": (100, 99),
    "sm_90": (228, 227),
    "sm_100": (228, 227),
    "sm_120": (100, 99),
}
"""KiB of shared memory of an SM, and most of a thread block: CUDA C++ Programming Guide, Table
"Technical Specifications per Compute Capability"."""


@pytest.fixture(autouse=True)
def new_process():
    """Configurations depend on Triton's version, which tests change."""
    for cached in (kernel_configuration, versions.available):
        cached.cache_clear()
    yield
    for cached in (kernel_configuration, versions.available):
        cached.cache_clear()


def test_gpus_have_the_memory_that_their_vendor_states():
    described = {name: Gpu.named(name) for name in Gpu.names()}
    assert {
        name: (gpu.shared_per_sm / 1024, gpu.shared_per_program / 1024)
        for name, gpu in described.items()
    } == SHARED
    for name, gpu in described.items():
        assert (gpu.name, gpu.arch, gpu.sms) == (name, int(name[3:]), 132)
        assert gpu.capability == (gpu.arch // 10, gpu.arch % 10)
    with pytest.raises(ValueError, match="'sm_75'; expected one of sm_80, sm_86, "):
        Gpu.named("sm_75")


# Tiles: height, block, segments, warps, stages, and programs of an SM; then blocks ahead, most
# registers, programs of an SM for one tile, spread, fewer programs and waves.
PLAIN = (0, None, None, False, (), 2)
PLAIN_ON_HOPPER = (*PLAIN[:-1], 1)
LARGE = (0, None, 1, False, (), 1)
CONFIGURATIONS = [
    (
        ("sm_90", 128, None, 4, 1),
        (8, 16, 1, 1, 3, 10, 1, 128, None, False, ((2, 5), (8, 8)), 1),
        (64, 64, 1, 4, 3, 2, 2, None, 1, False, (), 1),
        (64, 64, 32, 4, 2, 2, 2, None, 1, False, (), 1),
    ),
    (
        ("sm_90", 64, None, 8, 1),
        (8, 16, 1, 1, 3, 8, *PLAIN_ON_HOPPER),
        (64, 64, 1, 4, 3, 2, 3, None, 1, False, (), 1),
        (64, 64, 32, 4, 3, 2, 3, None, 1, False, (), 1),
    ),
    (
        ("sm_90", 128, E4M3, 4, 1),
        (8, 32, 1, 1, 3, 10, 1, 168, None, False, ((1, 4), (2, 6), (8, 8)), 1),
        (64, 64, 1, 4, 3, 2, 3, None, None, True, (), 1),
        (64, 64, 32, 4, 3, 2, 3, None, None, False, (), 1),
    ),
    (
        ("sm_90", 128, E4M3, 16, 4),  # several query tokens leave the small tile to others
        (16, 32, 1, 1, 3, 8, 1, None, None, False, ((4, 4),), 1),
        (64, 64, 1, 4, 3, 2, 3, None, None, True, (), 1),
        (64, 64, 32, 4, 2, 2, 3, None, None, False, (), 1),
    ),
    (
        ("sm_90", 128, None, 16, 1),
        (16, 16, 1, 1, 3, 8, 1, None, None, False, ((4, 4),), 1),
        (64, 64, 1, 4, 3, 2, 2, None, 1, False, (), 1),
        (64, 64, 32, 4, 2, 2, 2, None, 1, False, (), 1),
    ),
    (
        ("sm_90", 256, None, 32, 1),
        (32, 16, 1, 1, 3, 4, *PLAIN_ON_HOPPER),
        (64, 32, 1, 4, 2, 2, *LARGE),
        (64, 32, 32, 4, 2, 2, *LARGE),
    ),
    (
        ("sm_80", 128, None, 1, 1),
        (8, 16, 1, 1, 3, 8, *PLAIN),
        (64, 64, 1, 4, 2, 2, *LARGE),
        (64, 64, 32, 4, 2, 2, *LARGE),
    ),
    (
        ("sm_89", 256, None, 32, 1),
        (32, 16, 1, 4, 3, 1, *PLAIN),
        (64, 32, 1, 4, 2, 1, *LARGE),
        (64, 32, 32, 4, 2, 1, *LARGE),
    ),
    (
        ("sm_120", 96, None, 4, 8),
        (32, 16, 1, 1, 3, 3, *PLAIN),
        (64, 64, 1, 4, 2, 1, *LARGE),
        (64, 32, 32, 4, 2, 1, *LARGE),
    ),
]


@pytest.mark.parametrize(("kind", "small", "large", "masked"), CONFIGURATIONS, ids=str)
def test_configurations_are_those_that_were_measured(kind, small, large, masked, monkeypatch):
    """Another number needs a run on a GPU, or at least a look at what the compiler makes of it."""
    monkeypatch.setattr(triton, "__version__", "3.8.0")
    name, head_dim, kv_dtype, group, tokens = kind
    of = {"gpu": Gpu.named(name), "query_tokens": tokens, "kv_dtype": kv_dtype}
    found = kernel_configuration(head_dim, BFLOAT16, CPU, group, **of)
    sms = found.sms
    tiles = [
        (
            *(tile.height, tile.block_tokens, tile.block_segments, tile.num_warps),
            *(tile.num_stages, tile.programs / sms, tile.lookahead, tile.max_registers),
            tile.programs_for_one_tile and tile.programs_for_one_tile / sms,
            tile.spread,
            tuple((pairs / sms, programs / sms) for pairs, programs in tile.fewer_programs),
            tile.waves,
        )
        for tile in found.tiles
    ]
    assert tiles == [small, large, masked]
    assert found == KernelConfiguration(
        found.tiles,
        ReduceConfig(4, 2, 1, 32 * 132),
        ReduceConfig(32, 1, 1, 8 * 132),
        sms=132,
        overlapped=name in ("sm_90", "sm_100", "sm_120"),
        interpreted=False,
    )


def test_the_number_of_queries_decides_programs_and_merges():
    of = {"gpu": Gpu.named("sm_90"), "kv_dtype": E4M3}
    found = kernel_configuration(128, BFLOAT16, CPU, 4, **of)
    small = found.tiles[0]
    programs = [small.programs_for(pairs // 2, 2) / 132 for pairs in (2, 132, 134, 264, 266, 1058)]
    assert programs == [4, 4, 6, 6, 8, 10]
    assert replace(small, waves=2).programs_for(1, 132) == 2 * 4 * 132
    assert [found.reduce.blocks(heads) for heads in (1, 2, 3, 32)] == [1, 1, 2, 16]
    assert [found.few_queries(heads) for heads in (1, 32, 1056, 1057)] == [1056, 33, 1, 0]
    one_way = found.one_way()
    assert (found.fixed_tiles, one_way.fixed_tiles) == (False, True)
    assert (one_way.reduce, one_way.few) == (found.few, found.few)
    bfloat16 = kernel_configuration(128, BFLOAT16, CPU, 4, of["gpu"])
    small, large, masked = bfloat16.tiles
    assert bfloat16.one_way().tiles == (small, replace(large, programs_for_one_tile=None), masked)
    interpreted = kernel_configuration(64, BFLOAT16, CPU, 33)
    assert [(tile.height, tile.block_tokens) for tile in interpreted.tiles] == [
        *[(32, 256), (64, 256), (64, 256)]
    ]


@pytest.mark.parametrize(
    ("version", "limits"),
    [
        ("3.6.1", {1: 248, 2: 128, 3: 248, 4: 128, 5: 168, 7: 168, 8: 168}),
        ("3.7.0", {1: 248, 2: 128, 3: 248, 4: 128, 5: 168, 7: 168, 8: 168}),
        ("3.8.0", {1: 248, 2: 128, 3: 248, 4: 128, 5: 248, 7: 248, 8: 168}),
        ("3.9.2", {1: 248, 2: 168, 3: 248, 4: 168, 5: 248, 7: 248, 8: 168}),
        ("3.5.1", {}),
        ("3.10.0", {}),
        ("3.60.0", {}),
        ("4.6.0", {}),
    ],
)
def test_versions_of_triton(version, limits, monkeypatch, caplog):
    """Most registers of a small tile in Gluon, by its query heads; without any, the plain kernels
    run. A quarter of an SM holds two programs of 248 registers, or more of fewer."""
    monkeypatch.setattr(triton, "__version__", version)
    assert versions.available() == bool(limits)
    for group, registers in limits.items():
        assert versions.small_tile_limits(group) == (8 if registers == 248 else 10, registers)
    small, large, masked = kernel_configuration(128, BFLOAT16, CPU, 2, Gpu.named("sm_90")).tiles
    assert small.max_registers == limits.get(2)
    assert [bool(tile.lookahead) for tile in (small, large, masked)] == [bool(limits)] * 3
    said = [] if limits else [f"Triton {version}: it is not one of the tested versions 3.6, 3.7, "]
    assert len(caplog.messages) == len(said)  # once
    assert all(part in message for part, message in zip(said, caplog.messages, strict=True))


@pytest.mark.parametrize(
    ("kind", "gpu", "said"),
    [
        *(((64, 1, dim, FLOAT32, CPU), None, None) for dim in (64, 96, 128, 256)),
        ((65, 1, 64, FLOAT32, CPU), None, "65 query heads share a KV head; a tile holds 64"),
        ((4, 0, 64, FLOAT32, CPU), None, "4 query heads over 0 KV heads"),
        ((0, 1, 64, FLOAT32, CPU), None, "0 query heads over 1 KV heads"),
        ((4, 3, 64, FLOAT32, CPU), None, "4 query heads over 3 KV heads"),
        ((4, 1, 80, FLOAT32, CPU), None, "head dimension 80; supported are 64, 96, 128, 256"),
        ((4, 1, 64, torch.float64, CPU), None, "dtype float64; supported are float16, bfloat16, "),
        ((4, 1, 64, FLOAT32, CPU), "sm_80", "dtype float32 on a GPU"),
        ((4, 1, 64, BFLOAT16, CPU), "sm_80", None),
        ((4, 1, 64, BFLOAT16, torch.device("meta")), None, "device meta"),
        ((4, 1, 64, BFLOAT16, CPU), (7, 5), r"compute capability 7\.5; the kernels need 8\.0"),
    ],
)
def test_what_the_kernels_cannot_run_is_named(kind, gpu, said):
    described = Gpu.named(gpu) if isinstance(gpu, str) else gpu and Gpu(gpu, 1, 1, 1)
    found = unsupported(*kind, described)
    assert (found is None) == (said is None)
    assert said is None or re.match(said, found)


def test_dtypes_of_the_cache():
    """That of the queries, and those of 8 bits."""
    for dtype, fits in ((None, True), (BFLOAT16, True), (E4M3, True), (torch.float16, False)):
        found = unsupported(4, 1, 64, BFLOAT16, CPU, kv_dtype=dtype)
        assert (found is None) == fits
