"""Without a GPU: kernels compile for their GPUs, and the expected number of programs fits an SM."""

import re
import subprocess
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NamedTuple

import pytest
import torch
import triton

from attention_checks import tree_attention
from deft_backend.compile.variants import compile_all, compiling_for, recorded
from deft_backend.forest import build_forest
from deft_backend.kernels import Gpu, kernel_configuration
from deft_backend.kernels.hopper import versions as gluon_versions
from deft_backend.planner.on_device import SIZES

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
H100, A100 = Gpu.named("sm_90"), Gpu.named("sm_80")
REGISTERS = 65536  # of an SM, a quarter of them for each of its schedulers
RESERVED = 1024  # bytes of shared memory that a program takes beside its own
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SMALL, LARGE, MASKED = (f"hopper_{shape}_tile_attention" for shape in ("small", "large", "masked"))
ORDERED = "the kernel of small tiles, as the ordered tile"

needs_gluon = pytest.mark.skipif(
    not gluon_versions.available(), reason="kernels for another Triton"
)


class Resources(NamedTuple):
    """The resources that a program takes."""

    registers: int  # of a thread, as they are given out
    shared: int  # bytes
    stack: int  # bytes of a thread: spills
    warps: int

    def fit(self, gpu):
        """Programs that fit on an SM."""
        if self.warps == 1:  # each of the SM's four schedulers has registers of its own
            by_registers = 4 * (REGISTERS // 4 // (self.registers * 32))
        else:
            by_registers = REGISTERS // (self.registers * 32 * self.warps)
        return min(by_registers, gpu.shared_per_sm // (self.shared + RESERVED))


def check_order(variant, gpu, ptx):
    """A kernel that may start early waits for the one before; all but the last let the next start.

    Small tiles wait in two places: where they write results, and where they merge them.
    """
    expected = {
        "compare_rows": (0, 1),
        **dict.fromkeys((SMALL, "small_tile_attention"), (2, 1)),
        **dict.fromkeys(("reduce_partials", "write_plan", "write_flattened"), (1, 0)),
    }.get(name_of(variant), (1, 1))
    names = ("griddepcontrol.wait", "griddepcontrol.launch_dependents")
    found = tuple(map(ptx.count, names))
    assert found == (expected if gpu.capability >= (9, 0) else (0, 0)), variant.name


@cache
def resources(variant, gpu):
    """Compile a kernel as it is launched, and ask the assembler what it takes."""
    with compiling_for(gpu.arch):
        (kernel,) = compile_all([variant]).kernels
    check_order(variant, gpu, kernel.asm["ptx"])
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", text)}
    registers = -(-found["REG"] // 8) * 8
    shared, warps = kernel.metadata.shared, kernel.metadata.num_warps
    return Resources(registers, shared, found["STACK"], warps)


def name_of(variant):
    tile = dict(variant.constants).get("TILE")
    return ORDERED if getattr(tile, "ordered", False) else variant.name


def attention_of(gpu=H100, *, heads=(32, 8), requests=16, **changes):
    usual = {"head_dim": 128, "dtype": torch.bfloat16, "page_size": 16, "max_batch": requests}
    usual |= {"num_query_heads": heads[0], "num_kv_heads": heads[1], "compiled_for": gpu}
    return tree_attention(**(usual | changes))


def launched(attention, **given):
    """What a step launches, by the kernel's name."""
    return {name_of(variant): variant for variant in variants_of(attention, **given)}


def variants_of(attention, *, several=False, sinks=False):
    """What a step launches, in order. With `several`, a ragged batch of token trees."""
    requests, tokens, heads = attention.max_batch, attention.query_tokens, attention.num_query_heads
    q = torch.zeros(requests * tokens, heads, attention.head_dim, dtype=attention.dtype)
    page = (4, attention.page_size, attention.num_kv_heads, attention.head_dim)
    caches = torch.zeros(2, *page).to(attention.kv_dtype)
    table = torch.zeros(requests, 16, dtype=torch.int32)
    lens = torch.full((requests,), 40, dtype=torch.int32)
    given = {}
    if attention.kv_dtype != attention.dtype:
        given["k_scale"] = given["v_scale"] = attention.unit_scale
    if several:
        given["query_start"] = torch.arange(requests + 1, dtype=torch.int32) * tokens
        given["ancestors"] = torch.zeros(requests, tokens, 1, dtype=torch.int64)
    if sinks:
        given["sinks"] = torch.zeros(heads)
    forest = build_forest(range(requests), [30] * (requests - 1), [40] * requests)
    attention.plan(forest, query_tokens=tokens)
    with recorded() as found:
        attention.run(q, *caches, table, lens, static_launch=True, **given)
    return list(found)


def check(variant, programs, gpu=H100):
    """No spills, and an SM holds the launched number of programs."""
    found = resources(variant, gpu)
    assert found.stack == 0, (variant.name, found)
    assert found.fit(gpu) >= programs // gpu.sms, (variant.name, found)


def tiles_of(attention):
    return attention._shapes[attention.query_tokens].config.tiles


@needs_gluon
@pytest.mark.parametrize(
    ("head_dim", "dtype", "page_size"),
    [(128, torch.float16, 16), (128, torch.bfloat16, 1), (64, torch.bfloat16, 16)],
)
def test_kernels_on_hopper(head_dim, dtype, page_size):
    """Few queries and many, which take two configurations of stage 2."""
    for requests in (16, 600):
        attention = attention_of(
            head_dim=head_dim, dtype=dtype, page_size=page_size, requests=requests
        )
        config = attention._shapes[1].config
        large, small, stage_2 = launched(attention).values()
        assert large.name == LARGE
        check(small, config.tiles[0].programs)
        check(large, config.tiles[1].programs)
        few = requests <= config.few_queries(attention.num_query_heads)
        assert few is (requests == 16)
        reduce = config.few if few else config.reduce
        check(stage_2, min(16 * H100.sms, reduce.programs))


DRAFTS = {"query_tokens": 4}
FLATTENED = {"policy": "deft-flatten"}
INVARIANT = {"policy": "invariant", "max_tokens": 4096}


@needs_gluon
@pytest.mark.parametrize(
    ("shape", "step", "kernels"),
    [
        *(({"heads": (8 * group, 8)}, {}, [SMALL]) for group in (1, 2, 3, 7, 8, 12)),
        *(({**INVARIANT, "heads": (32, heads)}, {}, [SMALL, ORDERED]) for heads in (8, 32)),
        # Bits of trees and ragged batches.
        (DRAFTS, {"several": True}, [SMALL, LARGE]),
        ({"query_tokens": 8}, {"several": True}, [LARGE]),
        *(({**FLATTENED, "head_dim": dim}, {}, [MASKED]) for dim in (64, 128)),
        *(({**FLATTENED, **DRAFTS}, {"several": several}, [MASKED]) for several in (False, True)),
        ({**FLATTENED, "kv_dtype": E4M3}, {"sinks": True}, [MASKED]),
        ({**FLATTENED, "kv_dtype": E5M2, "head_dim": 64}, {"sinks": True}, [MASKED]),
        *(
            ({**FLATTENED, **DRAFTS, "kv_dtype": E4M3}, {"several": each, "sinks": True}, [MASKED])
            for each in (False, True)
        ),
        # Heads of 64 with sinks, as gpt-oss has them.
        ({"heads": (64, 8), "head_dim": 64, "kv_dtype": E4M3}, {"sinks": True}, [LARGE]),
        *(
            ({"heads": (8 * group, 8), "kv_dtype": E4M3}, {}, [SMALL, LARGE])
            for group in (1, 4, 16)
        ),
    ],
)
def test_tiles_fit_on_hopper(shape, step, kernels):
    attention = attention_of(**shape)
    tiles = dict(zip((SMALL, LARGE, MASKED, ORDERED), tiles_of(attention), strict=False))
    if shape.get("query_tokens", 1) > 1:  # blocks of 17 to 64 vectors run in the large tile only
        assert (tiles[SMALL].height, tiles[LARGE].height) == (16, 64)
    found = launched(attention, **step)
    for name in kernels:
        check(found[name], tiles[name].programs)


@pytest.mark.parametrize(
    ("gpu", "dtype", "kv_dtype"),
    [(H100, torch.bfloat16, E4M3), (A100, torch.float16, E5M2)],
    ids=["Hopper", "Ampere"],
)
def test_caches_of_eight_bits(gpu, dtype, kv_dtype, monkeypatch):
    """The plain kernels convert bytes on every GPU; the launched ones fit it, without spills."""
    monkeypatch.setattr(gluon_versions, "available", lambda: False)
    kernel_configuration.cache_clear()
    attention = attention_of(gpu, head_dim=64, dtype=dtype, kv_dtype=kv_dtype)
    small, large, _ = tiles_of(attention)
    kernel_configuration.cache_clear()
    found = launched(attention, sinks=True)
    check(found["small_tile_attention"], small.programs, gpu)
    check(found["partial_attention"], large.programs, gpu)


@needs_gluon
@pytest.mark.parametrize(("head_dim", "group"), [(64, 8), (128, 1), (128, 4), (128, 16)])
@pytest.mark.parametrize("requests", [8, 1056])
def test_stage_2_of_eight_bits_on_hopper(head_dim, group, requests):
    """It sets the counters of large programs to 0."""
    shape = {"heads": (8 * group, 8), "head_dim": head_dim, "kv_dtype": E4M3}
    stage_2 = launched(attention_of(**shape, requests=requests))["reduce_partials"]
    assert dict(stage_2.constants)["SPREAD"]
    assert resources(stage_2, H100).stack == 0


OF_POLICIES = ("choose_ranges", "assign_edges", "price_chunks", "measure_ranges")
"""Kernels of the device planner whose code depends on the policy."""


@pytest.mark.parametrize(
    ("policy", "batch"),
    [(name, size) for name in ("auto", "invariant", "deft-flatten") for size in SIZES]
    + [(n, SIZES[-1]) for n in ("flash-decoding", "deft-node-chunk", "fasttree", "flashforge")]
    + [("fasttree", size) for size in SIZES[:-1]],
)
def test_the_device_planner_on_hopper(policy, batch):
    """Every size of batch, without spills in its loops."""
    attention = attention_of(requests=batch, policy=policy, page_size=1)
    with recorded() as found:
        attention.plan_batch(
            torch.zeros((batch, 64), dtype=torch.int32),
            torch.ones(batch, dtype=torch.int64),
            on_device=True,
        )
    every = {"auto": 7, "invariant": 6, "deft-flatten": 9}
    chosen = [v for v in found if policy in every or v.name in OF_POLICIES]
    assert len(chosen) == every.get(policy, 3)
    for variant in chosen:
        taken = resources(variant, H100)
        # Triton 3.6 and 3.9 pass a few booleans or numbers through the stack, once in a program.
        assert taken.stack <= 16, (variant.name, taken)
        assert taken.fit(H100) >= 1, (variant.name, taken)
