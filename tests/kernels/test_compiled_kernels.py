"""Without a GPU: kernels compile for their GPUs, and the expected number of programs fits an SM."""

import re
import subprocess
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from deft_backend.compile.triton_kernel import Kernel
from deft_backend.kernels import configurations, kernel_configuration
from deft_backend.kernels.arguments import Partials, Scaling, Strides, Tensors
from deft_backend.kernels.hopper import versions as gluon_versions
from deft_backend.kernels.launches import Kind, launches_of
from deft_backend.planner import DevicePlan, PlanCapacity
from deft_backend.planner.device_plan import ItemArrays, ReduceArrays
from deft_backend.planner.on_device import SIZES, DevicePlanner
from deft_backend.policies import Target, get_policy
from deft_backend.shapes.query_blocks import QueryBlocks

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
SMS = 132
REGISTERS = 65536  # of an SM, a quarter of them for each of its schedulers
RESERVED = 1024  # bytes of shared memory that a program takes beside its own
SHARED = {9: 233472, 8: 167936}  # bytes of an SM, by compute capability
TYPES = {torch.float16: "fp16", torch.bfloat16: "bf16"}

needs_gluon = pytest.mark.skipif(
    not gluon_versions.available(), reason="kernels for another Triton"
)


class Resources(NamedTuple):
    """The resources that a program takes."""

    registers: int  # of a thread, as they are given out
    shared: int  # bytes
    stack: int  # bytes of a thread: spills
    warps: int

    def fit(self, major):
        """Programs that fit on an SM."""
        if self.warps == 1:  # each of the SM's four schedulers has registers of its own
            by_registers = 4 * (REGISTERS // 4 // (self.registers * 32))
        else:
            by_registers = REGISTERS // (self.registers * 32 * self.warps)
        return min(by_registers, SHARED[major] // (self.shared + RESERVED))


def config_of(major, head_dim, dtype, group, sms=SMS, kv_dtype=None, query_tokens=1):
    """As on an H100 or an A100, except the number of SMs."""
    properties = SimpleNamespace(
        multi_processor_count=sms, shared_memory_per_block_optin=SHARED[major] - RESERVED,
        shared_memory_per_multiprocessor=SHARED[major], major=major, minor=0,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        kernel_configuration.cache_clear()
        config = kernel_configuration(
            head_dim, dtype, torch.device("cuda", 0), group, kv_dtype=kv_dtype,
            query_tokens=query_tokens,
        )  # fmt: skip
        kernel_configuration.cache_clear()
    return config


def kind_of(head_dim, dtype, page_size):
    """Eight KV heads, and four query heads of each, over pages that lie one behind the other."""
    strides = (page_size * 8 * head_dim, 8 * head_dim, head_dim)
    return Kind(
        dtype=dtype, k_strides=strides, v_strides=strides, num_heads=32, num_kv_heads=8,
        head_dim=head_dim, page_size=page_size, soft_cap=False, wide_rows=True,
        table_by_segment=True, exponent_bits=0, sinks=False, device_scales=False,
    )  # fmt: skip


def argument_types(dtype, eight_bits=False):
    """The types of both stages' arguments, as hosts give them."""
    data, integers, numbers = f"*{TYPES[dtype]}", "*i32", "*fp32"
    cache = "*u8" if eight_bits else data
    partial = Partials("*fp16", numbers, numbers)
    return {
        "tensors": Tensors(
            data, cache, cache, data, partial, *4 * [integers], "*i64", *3 * [numbers]
        ),
        "partial": partial,
        "out_ptr": data,
        "sinks": numbers,
        "query_start_ptr": integers,
        "scaling": Scaling("fp32", "fp32", "fp32"),
        "strides": Strides(*["i32"] * len(Strides._fields)),
        "stride_out_batch": "i32",
        "stride_out_head": "i32",
    }


def plan_types(arrays):
    """The types of the plan's arrays that a stage reads."""
    return arrays(*["*i32"] * len(arrays._fields))


@cache
def resources(launch, dtype, major):
    """Compile a kernel as it is launched, and ask the assembler what it takes."""
    function = launch.kernel._compiled
    arrays = ReduceArrays if launch.kernel is configurations.REDUCE_PARTIALS else ItemArrays
    constants = launch.constants
    eight_bits = "CACHE" in constants and constants["CACHE"].exponent_bits > 0
    types = {**argument_types(dtype, eight_bits), "plan": plan_types(arrays)}
    types = {name: types[name] for name in function.arg_names if name not in launch.constants}
    gluon = (
        configurations.HOPPER_LARGE_TILE, configurations.HOPPER_MASKED_TILE,
        configurations.HOPPER_SMALL_TILE,
    )  # fmt: skip
    options = launch.options
    return compiled(function, types, launch.constants, options, major, launch.kernel in gluon)


def compiled(function, types, constants, options, major, gluon=False):
    """Compile a kernel for arguments of `types`; pointers and strides are multiples of 16."""
    names = function.arg_names
    aligned = [["tt.divisibility", 16]]
    described: dict[str, Any] = {
        "fn": function,
        "signature": {n: types.get(n, "constexpr") for n in names},
        "constexprs": {(names.index(n),): value for n, value in constants.items()},
        "attrs": {
            path: aligned for i, n in enumerate(names)
            for path, type_ in leaves((i,), types.get(n, ""))
            if type_.startswith("*") or n.startswith("stride")
        },
    }  # fmt: skip
    source = ASTSource
    if gluon:
        from triton.experimental.gluon._runtime import GluonASTSource as source
    target = GPUTarget("cuda", major * 10, 32)
    binary = triton.compile(source(**described), target=target, options=options)
    found = _usage(binary.asm["cubin"])
    registers = -(-found["REG"] // 8) * 8
    return Resources(registers, binary.metadata.shared, found["STACK"], options["num_warps"])


def leaves(path, types):
    """Every argument in a structure: its path there, as Triton writes it, and its type."""
    if isinstance(types, str):
        yield path, types
        return
    for i, part in enumerate(types):
        yield from leaves((*path, i), part)


def _usage(binary):
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [str(CUOBJDUMP), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {name: int(value) for name, value in re.findall(r"(REG|STACK):(\d+)", text)}


def check_launch(launch, programs, dtype, major=9):
    """No spills, and an SM holds the launched number of programs."""
    found = resources(launch, dtype, major)
    assert found.stack == 0, (launch.kernel._name, found)
    assert found.fit(major) >= programs // SMS, (launch.kernel._name, found)


def check_tiles(config, launches, dtype, major=9):
    """The small tile and the large tile, as they follow another launch."""
    for tile, (_, launch) in zip(config.tiles[:2], launches.stage1[:2], strict=True):
        check_launch(launch, tile.programs, dtype, major)


@needs_gluon
@pytest.mark.parametrize(
    ("head_dim", "dtype", "page_size"),
    [(128, torch.float16, 16), (128, torch.bfloat16, 1), (64, torch.bfloat16, 16)],
)
def test_kernels_on_hopper(head_dim, dtype, page_size):
    config = config_of(9, head_dim, dtype, 4)
    launches = launches_of(config, kind_of(head_dim, dtype, page_size))
    check_tiles(config, launches, dtype)
    for reduce, launch in zip((config.reduce, config.few), launches.stage2, strict=True):
        check_launch(launch, min(16 * SMS, reduce.programs), dtype)


@needs_gluon
@pytest.mark.parametrize("group", [1, 2, 3, 7, 8, 12])
def test_small_tiles_of_every_gqa_group_on_hopper(group):
    dtype = torch.bfloat16
    config = config_of(9, 128, dtype, group)
    kind = kind_of(128, dtype, 16)._replace(num_heads=8 * group)
    launch = launches_of(config, kind).stage1[0][1]
    assert launch.kernel is configurations.HOPPER_SMALL_TILE
    check_launch(launch, config.tiles[0].programs, dtype)


@needs_gluon
def test_several_query_tokens_on_hopper():
    """Bits of trees and ragged batches, in the small tile of 16 vectors and in the large tile."""
    dtype, blocks = torch.bfloat16, QueryBlocks.of(4, 4)
    config = config_of(9, 128, dtype, 4, query_tokens=4)
    kind = kind_of(128, dtype, 16)._replace(blocks=blocks, ragged=True, tree=True)
    launches = launches_of(config, kind)
    assert [tile.height for tile in config.tiles[:2]] == [16, 64]
    check_tiles(config, launches, dtype)
    # Blocks of 17 to 64 vectors run in the large tile only. A device plan launches both.
    config = config_of(9, 128, dtype, 4, query_tokens=8)
    assert config.tiles[0].height == 16
    kind = kind._replace(blocks=QueryBlocks.of(8, 4))
    for _, launch in launches_of(config, kind).stage1[:2]:
        assert resources(launch, dtype, 9).stack == 0


@needs_gluon
@pytest.mark.parametrize(
    ("head_dim", "query_tokens", "bits"),
    [(128, 1, 0), (64, 1, 0), (128, 4, 0), (128, 1, 4), (64, 1, 5), (128, 4, 4)],
)
def test_masked_tiles_on_hopper(head_dim, query_tokens, bits):
    dtype = torch.bfloat16
    kv_dtype = {0: None, 4: torch.float8_e4m3fn, 5: torch.float8_e5m2}[bits]
    config = config_of(9, head_dim, dtype, 4, kv_dtype=kv_dtype, query_tokens=query_tokens)
    kind = kind_of(head_dim, dtype, 16)._replace(exponent_bits=bits, sinks=bits > 0)
    for several in ((False, False), (True, True)) if query_tokens > 1 else ((False, False),):
        ragged, tree = several
        of_tokens = kind._replace(blocks=QueryBlocks.of(query_tokens, 4), ragged=ragged, tree=tree)
        launch = launches_of(config, of_tokens).stage1[2][1]
        assert launch.kernel is configurations.HOPPER_MASKED_TILE
        check_launch(launch, config.tiles[2].programs, dtype)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "major"),
    [(torch.bfloat16, torch.float8_e4m3fn, 9), (torch.float16, torch.float8_e5m2, 8)],
)
def test_caches_of_eight_bits(dtype, kv_dtype, major, monkeypatch):
    """The plain kernels convert bytes on every GPU; the launched ones fit it, without spills."""
    monkeypatch.setattr(gluon_versions, "available", lambda: False)
    config = config_of(major, 64, dtype, 4, kv_dtype=kv_dtype)
    bits = configurations.EXPONENT_BITS[kv_dtype]
    kind = kind_of(64, dtype, 16)._replace(exponent_bits=bits, sinks=True, device_scales=True)
    for tile, (_, launch) in zip(
        config.tiles[:2], launches_of(config, kind).stage1[:2], strict=True
    ):
        assert tile.lookahead == 0
        waves = 2 if tile.height < 64 else 1
        check_launch(launch, tile.programs // waves, dtype, major)


@needs_gluon
def test_the_large_tile_of_eight_bits_with_small_heads():
    """Heads of 64, as gpt-oss has them, with sinks."""
    dtype, kv_dtype = torch.bfloat16, torch.float8_e4m3fn
    config = config_of(9, 64, dtype, 8, kv_dtype=kv_dtype)
    bits = configurations.EXPONENT_BITS[kv_dtype]
    kind = kind_of(64, dtype, 16)._replace(exponent_bits=bits, sinks=True, device_scales=True)
    large = launches_of(config, kind).stage1[1][1]
    assert large.kernel is configurations.HOPPER_LARGE_TILE
    check_launch(large, config.tiles[1].programs, dtype)


@needs_gluon
@pytest.mark.parametrize("group", [1, 4, 16])
def test_tiles_of_eight_bits_on_hopper(group):
    dtype, kv_dtype = torch.bfloat16, torch.float8_e4m3fn
    config = config_of(9, 128, dtype, group, kv_dtype=kv_dtype)
    bits = configurations.EXPONENT_BITS[kv_dtype]
    kind = kind_of(128, dtype, 16)._replace(
        num_heads=8 * group, exponent_bits=bits, device_scales=True
    )
    launches = launches_of(config, kind)
    (_, small), (_, large) = launches.stage1[:2]
    assert small.kernel is configurations.HOPPER_SMALL_TILE
    assert large.kernel is configurations.HOPPER_LARGE_TILE
    for stage_2 in launches.stage2:  # it sets the counters of large programs to 0
        assert stage_2.constants["SPREAD"]
        assert resources(stage_2, dtype, 9).stack == 0
    check_tiles(config, launches, dtype)


@pytest.fixture
def unknown_triton(monkeypatch):
    """A version of Triton that no test has run with."""
    monkeypatch.setattr(triton, "__version__", "4.0.0")
    for cached in (gluon_versions.unavailable, gluon_versions.log_unavailable):
        cached.cache_clear()
    yield
    for cached in (gluon_versions.unavailable, gluon_versions.log_unavailable):
        cached.cache_clear()


def test_an_unknown_triton_runs_the_plain_kernels_and_says_so_once(unknown_triton, caplog):
    for head_dim in (64, 128):
        config = config_of(9, head_dim, torch.bfloat16, 4)
        launches = launches_of(config, kind_of(head_dim, torch.bfloat16, 16))
        kernels = [launch.kernel for _, launch in launches.stage1]
        assert kernels == [configurations.SMALL_TILE] + 2 * [configurations.PARTIAL_ATTENTION]
    (record,) = caplog.records
    assert "Triton 4.0.0 is not one of the tested versions" in record.getMessage()


@needs_gluon
def test_leaves_fit_beside_one_stem_of_an_sm():
    """Two warps fit in each quarter of an SM's registers, if few large tiles leave room for
    them."""
    config = config_of(9, 128, torch.bfloat16, 4)
    launches = launches_of(config, kind_of(128, torch.bfloat16, 1))
    (_, leaf), (_, stem) = launches.stage1[:2]
    leaves, stems = resources(leaf, torch.bfloat16, 9), resources(stem, torch.bfloat16, 9)
    assert (leaves.warps, stems.warps) == (1, 4)
    # Triton 3.9's code for a merge needs more registers: one program fits there.
    beside = 1 if triton.__version__.startswith("3.9.") else 2
    assert stems.registers * 32 + beside * leaves.registers * 32 <= REGISTERS // 4
    left = SHARED[9] - (stems.shared + RESERVED)
    assert left // (leaves.shared + RESERVED) >= 6
    # Small tiles of 16 vectors keep their results where their last K and V were.
    config = config_of(9, 128, torch.bfloat16, 16)
    kind = kind_of(128, torch.bfloat16, 1)._replace(num_heads=128)
    taller = resources(launches_of(config, kind).stage1[0][1], torch.bfloat16, 9)
    assert left // (taller.shared + RESERVED) >= 4


def test_kernels_on_ampere():
    """The plain kernels compile, and the launched ones fit the GPU."""
    config = config_of(8, 128, torch.float16, 4)
    launches = launches_of(config, kind_of(128, torch.float16, 16))
    for tile, (first, _) in zip(config.tiles, launches.stage1, strict=True):
        found = resources(first, torch.float16, 8)
        waves = 2 if tile.height < 64 else 1  # the GPU deals the second half of small programs
        assert found.fit(8) >= tile.programs // SMS // waves, (first.kernel._name, found)


OF_POLICIES = ("choose_ranges", "assign_edges", "price_chunks", "measure_ranges")
"""Kernels of the device planner whose code depends on the policy."""


@pytest.mark.parametrize(
    ("policy", "batch"),
    [("auto", size) for size in SIZES]
    + [(n, SIZES[-1]) for n in ("flash-decoding", "deft-node-chunk", "fasttree", "flashforge")]
    + [("fasttree", size) for size in SIZES[:-1]],
)
def test_the_device_planner_on_hopper(policy, batch, monkeypatch):
    """Every size of batch, without spills."""
    found = {}

    def compile_it(kernel, grid, arguments, constants, **options):
        for name in ("variant", "aligned", "interpreted"):
            del options[name]
        if policy != "auto" and kernel._name not in OF_POLICIES:
            return
        names = [n for n in kernel._compiled.arg_names if n not in constants]
        given = kernel.named(arguments)
        types = {n: type_of(value) for n, value in zip(names, given, strict=True)}
        found[kernel._name] = compiled(kernel._compiled, types, constants, options, 9)

    cpu = torch.device("cpu")
    plan = DevicePlan(PlanCapacity.for_batch(batch), cpu)
    planner = DevicePlanner(Target(32, 8, 128), get_policy(policy), plan, cpu, 1, overlapped=True)
    planner._interpreted = False
    monkeypatch.setattr(Kernel, "launch", compile_it)
    rows = torch.arange(batch)
    planner.plan(torch.zeros((batch, 64), dtype=torch.int32), rows, torch.ones_like(rows))
    assert len(found) == (7 if policy == "auto" else 3)
    for name, taken in found.items():
        # Triton 3.9 packs four booleans through the stack once in a program. That is no spill.
        packs_booleans = triton.__version__.startswith("3.9.") and name == "find_nodes"
        assert taken.stack <= (8 if packs_booleans else 0), (name, taken)
        assert taken.fit(9) >= 1, (name, taken)


def type_of(argument):
    """Of a launch's argument."""
    if isinstance(argument, tuple):
        types = tuple(map(type_of, argument))
        return types if type(argument) is tuple else type(argument)(*types)
    if isinstance(argument, torch.Tensor):
        return {torch.int32: "*i32", torch.int64: "*i64", torch.float32: "*fp32"}[argument.dtype]
    return "fp32" if isinstance(argument, float) else "i32"


@needs_gluon
@pytest.mark.parametrize(("sms", "stems"), [(132, 264), (600, 1024)])
def test_programs_follow_from_the_gpu(sms, stems):
    """Large tiles' programs read their first items before they know their number: at most
    READ_AHEAD."""
    config = config_of(9, 128, torch.float16, 4, sms)
    small, large, masked = config.tiles
    assert (small.programs, large.programs) == (10 * sms, stems)
    assert large.programs_for_one_tile == sms
    assert (small.lookahead, large.lookahead, masked.lookahead) == (1, 2, 2)
    assert config.overlapped


@needs_gluon
@pytest.mark.parametrize(
    ("group", "kv_dtype", "per_sm"),
    [
        (4, None, (5, 5, 5, 5, 8, 8, 8, 8, 10, 10)),
        (4, torch.float8_e4m3fn, (4, 4, 6, 6, 8, 8, 8, 8, 10, 10)),
        (16, None, (4, 4, 4, 4, 4, 4, 8, 8, 8, 8)),
        (16, torch.float8_e4m3fn, (4, 4, 4, 4, 4, 4, 8, 8, 8, 8)),
    ],
)
def test_small_batches_launch_fewer_small_programs(group, kv_dtype, per_sm):
    """By the number of queries times KV heads; more than the rule names takes all programs."""
    small, large, _ = config_of(9, 128, torch.bfloat16, group, 132, kv_dtype=kv_dtype).tiles
    queries = (1, 16, 17, 33, 34, 66, 67, 132, 133, 2048)
    assert [small.programs_for(count, 8) for count in queries] == [132 * each for each in per_sm]
    assert small.programs_for(132, 32) == 132 * per_sm[-1]
    assert large.programs_for(1, 8) == large.programs
    if kv_dtype is not None:
        assert large.programs_for_one_tile is None
