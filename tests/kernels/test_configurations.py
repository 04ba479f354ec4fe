"""Kernel configurations of GPUs that are not at hand, as the kernels were measured or compiled."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import triton

from deft_backend.kernels import Gpu
from deft_backend.kernels.configurations import kernel_configuration, unsupported
from deft_backend.kernels.hopper import versions
from drawings import check_asked

CPU, E4M3 = torch.device("cpu"), torch.float8_e4m3fn
BFLOAT16 = torch.bfloat16

SHARED = {
    **dict.fromkeys(("sm_80", "sm_87"), (164, 163)),
    **dict.fromkeys(("sm_86", "sm_89", "sm_120"), (100, 99)),
    **dict.fromkeys(("sm_90", "sm_100"), (228, 227)),
}
"""KiB of shared memory of an SM, and most of a thread block: CUDA C++ Programming Guide, Table
"Technical Specifications per Compute Capability"."""


def forget():
    """Configurations depend on Triton's version, which tests change."""
    for cached in (kernel_configuration, versions.available):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def new_process():
    forget()
    yield
    forget()


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


def test_configurations_are_those_that_were_measured(monkeypatch):
    """Another number needs a run on a GPU, or at least a look at what the compiler makes of it.

    A line asks for a GPU or the interpreter, head dimension, dtype of the cache, GQA group and
    query tokens.
    """
    monkeypatch.setattr(triton, "__version__", "3.8.0")

    def answer(name, head_dim, kv_dtype, group, tokens):
        of = {"query_tokens": int(tokens), "kv_dtype": getattr(torch, kv_dtype)}
        gpu = None if name == "cpu" else Gpu.named(name)
        found = kernel_configuration(int(head_dim), BFLOAT16, CPU, int(group), gpu, **of)
        return [*map(str, found.tiles), str(replace(found, tiles=()))]

    check_asked(Path(__file__).with_name("configurations.txt"), answer)


def test_the_number_of_queries_decides_programs_and_merges(monkeypatch):
    of = {"gpu": Gpu.named("sm_90"), "kv_dtype": E4M3}
    found = kernel_configuration(128, BFLOAT16, CPU, 4, **of)
    small = found.tiles[0]
    programs = [small.programs_for(pairs // 2, 2) / 132 for pairs in (2, 132, 134, 264, 266, 1058)]
    assert programs == [4, 4, 6, 6, 8, 10]
    assert replace(small, waves=2).programs_for(1, 132) == 2 * 4 * 132
    assert [found.reduce.blocks(heads) for heads in (1, 2, 3, 32)] == [1, 1, 2, 16]
    assert [found.few_queries(heads) for heads in (1, 32, 1056, 1057)] == [1056, 33, 1, 0]
    one_way = found.one_way(decode=True)
    assert (found.fixed_tiles, one_way.fixed_tiles) == (False, True)
    assert (one_way.reduce, one_way.few) == (found.few, found.few)
    bfloat16 = kernel_configuration(128, BFLOAT16, CPU, 4, of["gpu"])
    small, large, masked = bfloat16.tiles
    *tiles, ordered = bfloat16.one_way(decode=True).tiles
    assert tiles == [small, replace(large, programs_for_one_tile=None), masked]
    assert (ordered.height, ordered.block_tokens, ordered.lookahead) == (8, large.block_tokens, 1)
    assert (ordered.programs_for(2, 2), ordered.max_registers) == (3 * 132, None)
    others = [(128, 4, Gpu.named("sm_80")), (128, 16, of["gpu"]), (64, 4, of["gpu"])]
    others = [kernel_configuration(dim, BFLOAT16, CPU, *rest) for dim, *rest in others]
    assert [len(each.one_way(decode=True).tiles) for each in (found, *others)] == [3] * 4
    assert len(bfloat16.one_way(decode=False).tiles) == 3
    monkeypatch.setattr(triton, "__version__", "3.9.0")  # where no GPU has shown the bits
    assert len(bfloat16.one_way(decode=True).tiles) == 3


def test_versions_of_triton(monkeypatch, caplog):
    """Programs on an SM and most registers of a small tile in Gluon, by its query heads; without
    any, the plain kernels run, and the log says so once."""

    def answer(version):
        monkeypatch.setattr(triton, "__version__", version)
        forget()
        caplog.clear()
        small, *others = kernel_configuration(128, BFLOAT16, CPU, 2, Gpu.named("sm_90")).tiles
        assert [bool(tile.lookahead) for tile in (small, *others)] == [versions.available()] * 3
        if not versions.available():
            assert small.max_registers is None
            return caplog.messages
        limits = {heads: versions.small_tile_limits(heads) for heads in (1, 2, 3, 4, 5, 7, 8)}
        assert small.max_registers == limits[2][1]
        return [str(limits), *caplog.messages]

    check_asked(Path(__file__).with_name("versions.txt"), answer)


def test_what_the_kernels_cannot_run_is_named():
    """A line asks for query heads, KV heads, head dimension, dtypes of queries and cache, device
    and, for tensors that are not on a GPU, the compute capability of another one."""

    def answer(*words):
        *numbers, dtype, kv_dtype, device = words[:6]
        capability = tuple(map(int, words[6:]))
        dtypes = [getattr(torch, name) for name in (dtype, kv_dtype)]
        gpu = Gpu(capability, 1, 1, 1) if capability else None
        shape = (*map(int, numbers), dtypes[0], torch.device(device))
        return [str(unsupported(*shape, gpu, kv_dtype=dtypes[1]))]

    check_asked(Path(__file__).with_name("unsupported.txt"), answer)
