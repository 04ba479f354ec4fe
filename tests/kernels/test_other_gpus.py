"""Without a GPU: every plain kernel compiles for the GPUs that run it and fits their memory."""

from itertools import product

import pytest
import torch
import triton
from test_compiled_kernels import attention_of, check, launched, resources, tiles_of, variants_of

from compiled_gpus import COMPILED
from deft_backend.attention import Gpu

SPILLED = {64: 176, 96: 288, 128: 288, 256: 864}
"""Bytes of a thread that a tile may spill, by the head dimension. Accumulators and queries of heads
of 256 need more than the 255 registers that a thread can have."""

SPILLED_ON_BLACKWELL = 864
"""On sm_100, with heads of 128 as well: results pass from the tensor memory through registers."""

SPILLED_BY_TRITON_3_8 = {("sm_120", 128, torch.float8_e4m3fn, 4): 352}
"""Triton 3.6 and 3.9 keep to the limits above there."""

SPILLED_MASKED = 1024
"""In the masked tile, which also holds the segments; `deft-flatten` alone runs it."""

EVERY = [
    *product(COMPILED.values(), (64, 128, 256), (None, torch.float8_e4m3fn), (1, 4)),
    *product(("sm_90",), (96, 256), (None, torch.float8_e4m3fn), (1, 4)),  # the others are Gluon's
]
CHEAP = [
    ("sm_80", 128, None, 1),
    ("sm_86", 64, torch.float8_e4m3fn, 4),
    ("sm_89", 256, None, 4),
    ("sm_100", 128, torch.float8_e4m3fn, 1),
    ("sm_120", 64, None, 1),
    ("sm_90", 256, None, 4),
]


@pytest.mark.parametrize(
    ("name", "head_dim", "kv_dtype", "query_tokens"),
    [
        pytest.param(
            *case,
            marks=() if case in CHEAP else (pytest.mark.rare,),
            id="-".join(str(part).removeprefix("torch.") for part in case),
        )
        for case in EVERY
    ],
)
def test_plain_kernels_fit(name, head_dim, kv_dtype, query_tokens):
    """Small, large and masked tiles and the reduction; a step of several query tokens has trees."""
    gpu = Gpu.named(name)
    shape = {"head_dim": head_dim, "kv_dtype": kv_dtype, "query_tokens": query_tokens}
    attention = attention_of(gpu, **shape, requests=8, policy="deft-flatten")
    found = variants_of(attention, several=query_tokens > 1)
    names = [kernel.name for kernel in found]
    assert names == [*["partial_attention"] * 2, "small_tile_attention", "reduce_partials"]
    others = SPILLED_ON_BLACKWELL if name == "sm_100" else SPILLED[head_dim]
    if triton.__version__.startswith("3.8."):
        case = (name, head_dim, kv_dtype, query_tokens)
        others = SPILLED_BY_TRITON_3_8.get(case, others)
    programs = [tile.programs // gpu.sms for tile in reversed(tiles_of(attention))]
    allowed = (SPILLED_MASKED, others, others, others)
    for kernel, at_once, spilled in zip(found, (*programs, 1), allowed, strict=True):
        taken = resources(kernel, gpu)
        assert taken.shared <= gpu.shared_per_program, (kernel.name, taken)
        assert taken.fit(gpu) >= at_once, (kernel.name, at_once, taken)
        assert taken.stack <= spilled, (kernel.name, taken)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.rare) for name in ("sm_86", "sm_120")] + ["sm_89"]
)
def test_the_largest_small_tile_on_gpus_with_little_shared_memory(name):
    """32 query vectors of 256 elements need the registers of four warps."""
    gpu = Gpu.named(name)
    attention = attention_of(gpu, heads=(32, 1), head_dim=256, requests=8)
    assert tiles_of(attention)[0].height == 32
    check(launched(attention)["small_tile_attention"], tiles_of(attention)[0].programs, gpu)
