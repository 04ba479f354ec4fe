"""A launch never reuses what an earlier launch kept for tensors of another kind."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from deft_backend.kernels import Partials, Step, both_stages, configurations, launches, run_plan
from deft_backend.kernels.configurations import KernelConfiguration, ReduceConfig, TileConfig
from deft_backend.planner import DevicePlan, PlanCapacity

KERNELS = (
    configurations.PARTIAL_ATTENTION,
    configurations.SMALL_TILE,
    configurations.HOPPER_LARGE_TILE,
    configurations.REDUCE_PARTIALS,
)
TILES = (
    TileConfig(8, 16, 1, 1, 3, 100),
    TileConfig(64, 64, 1, 4, 3, 20, lookahead=1),
    TileConfig(64, 64, 32, 4, 3, 20),
)
MANY, FEW = ReduceConfig(8, 1, 1, 100), ReduceConfig(32, 1, 4, 40)
CONFIG = KernelConfiguration(TILES, MANY, FEW, sms=132, overlapped=True, interpreted=False)
PLAN = DevicePlan(PlanCapacity(4, 8, 8, 8), torch.device("cpu"))
LEAVES = SimpleNamespace(items_of={0: (0, 4), 1: (0, 0), 2: (4, 4)}.get, reduce_query=[0])
"""The parts of a known plan that a launch reads, without items of larger tile shapes."""


class Compiler:
    """In Triton's place: notes, launch by launch, what the kernel that ran was compiled for and
    what it was given."""

    def __init__(self, patch):
        self.launched = []
        self.compiled = 0
        self._patch = patch
        for kernel in KERNELS:
            patch.setattr(kernel, "_compiled", OnGrid(partial(self._compile, kernel)))
        self.forget()

    def forget(self):
        """As in a new process."""
        launches.launches_of.cache_clear()
        for kernel in KERNELS:
            self._patch.setattr(kernel, "_variants", {})

    def launches_of(self, call):
        self.launched = []
        call()
        return self.launched

    def _compile(self, kernel, grid, *arguments, **named):
        self.compiled += 1
        variant = partial(self._launch, kernel._name, (named, looked_at(arguments)))
        variant(grid, *arguments, *(named[name] for name in kernel.constants))
        return OnGrid(variant)

    def _launch(self, name, compiled_for, grid, *given):
        self.launched.append((name, grid, compiled_for, looked_at(given)))


class OnGrid:
    """A kernel that callers launch as ``kernel[grid](...)``."""

    def __init__(self, call):
        self._call = call

    def __getitem__(self, grid):
        return partial(self._call, grid)


def looked_at(arguments):
    """What Triton compiles for, argument by argument."""

    def kind(argument):
        if isinstance(argument, tuple):
            return looked_at(argument)
        if isinstance(argument, torch.Tensor):
            return argument.dtype, argument.device, argument.data_ptr() % 16 == 0
        return float if isinstance(argument, float) else argument

    return [kind(argument) for argument in arguments]


def launch_all(
    *,
    config=CONFIG,
    known_plan=None,
    logit_cap=0.0,
    device="cpu",
    dtype=torch.bfloat16,
    heads=8,
    kv_heads=2,
    head_dim=128,
    page_size=2,
    table=torch.int32,
    lens=torch.int64,
    columns=8,
    skip=0,
    first=0,
    q_width=256,
    out_width=256,
    kv_width=256,
    queries=4,
    sinks=None,
    kv_dtype=None,
    scales="host",
):
    """Both stages over tensors that lie in larger ones: one thing can change without another."""

    def rows_of(width):
        held = torch.zeros(queries, 16, width, dtype=dtype, device=device)
        return held[:, :heads, skip : skip + head_dim]

    held = torch.zeros(2, 12, 4, 4, kv_width, device=device).to(kv_dtype or dtype)
    k_cache, v_cache = held[:, :, :page_size, :kv_heads, :head_dim]

    scale = torch.ones(1) if scales == "device" else 1.0
    step = Step(
        rows_of(q_width),
        k_cache,
        v_cache,
        rows_of(out_width),
        torch.zeros(5, columns, dtype=table)[:, first:],
        torch.zeros(first + queries, dtype=lens)[first:],
        torch.zeros(queries, dtype=torch.int32),
        query_start=None,
        ancestors=None,
        sinks=None if sinks is None else torch.zeros(heads, dtype=sinks),
        k_scale=scale,
        v_scale=scale,
        sm_scale=0.1,
        logit_cap=logit_cap,
    )
    partial = Partials(torch.zeros(8, 16, 256), torch.zeros(8, 16), torch.zeros(8, 16))
    run_plan(
        config,
        PLAN,
        step,
        partial,
        known_plan=known_plan,
        masked_tiles=False,
    )


@pytest.mark.parametrize(
    "change",
    [
        {"config": replace(CONFIG, overlapped=False)},
        {"config": replace(CONFIG, tiles=(replace(TILES[0], num_warps=2), *TILES[1:]))},
        {"config": replace(CONFIG, few=ReduceConfig(4, 1, 1, 100))},
        {"queries": 20},
        {"known_plan": LEAVES},
        {"logit_cap": 30.0},
        {"device": "meta"},
        {"dtype": torch.float16},
        {"heads": 4},
        {"kv_heads": 4},
        {"head_dim": 64},
        {"page_size": 4},
        {"table": torch.int64},
        {"lens": torch.int32},
        {"columns": 9},
        {"skip": 1},
        {"skip": 8},
        {"first": 1},
        {"q_width": 257},
        {"q_width": 264},
        {"out_width": 264},
        {"kv_width": 264},
        {"kv_width": 257},
        {"sinks": torch.float32},
        {"sinks": torch.bfloat16},
        {"kv_dtype": torch.float8_e4m3fn},
        {"kv_dtype": torch.float8_e5m2},
        {"kv_dtype": torch.float8_e4m3fn, "scales": "device"},
    ],
    ids=lambda change: ", ".join(change),
)
def test_kinds_are_not_mixed_up(change, monkeypatch):
    """Whatever ran before, launches are those of a process that sees their kind alone."""
    compiler = Compiler(monkeypatch)
    calls = (launch_all, partial(launch_all, **change))
    alone = []
    for call in calls:
        compiler.forget()
        alone.append(compiler.launches_of(call))
    same = change == {"skip": 8}  # another address, aligned as before
    assert (alone[0] == alone[1]) is same
    compiler.forget()
    for call, expected in zip(calls, alone, strict=True):
        assert compiler.launches_of(call) == expected
    aligned = change not in ({"skip": 1}, {"first": 1})
    for call, expected in zip(calls, alone, strict=True):
        compiler.compiled = 0
        assert compiler.launches_of(call) == expected
        assert compiler.compiled == (0 if aligned or call is launch_all else len(expected))


LARGE, PLAIN, SMALL, REDUCE = (
    "hopper_large_tile_attention",
    "partial_attention",
    "small_tile_attention",
    "reduce_partials",
)


@pytest.mark.parametrize(
    ("kind", "names", "early"),
    [
        ({}, [LARGE, SMALL, REDUCE], [SMALL, REDUCE]),
        # A slice of a batch's integers has the bits of the whole: the same kernel reads it.
        ({"first": 1}, [LARGE, SMALL, REDUCE], [SMALL, REDUCE]),
        ({"known_plan": LEAVES}, [SMALL, REDUCE], [REDUCE]),
        ({"skip": 1}, [PLAIN, SMALL, REDUCE], [SMALL, REDUCE]),
        ({"q_width": 257}, [PLAIN, SMALL, REDUCE], [SMALL, REDUCE]),
        ({"kv_width": 260}, [PLAIN, SMALL, REDUCE], [SMALL, REDUCE]),
        ({"config": replace(CONFIG, overlapped=False)}, [LARGE, SMALL, REDUCE], []),
    ],
    ids=["", "slice", "leaves", "unaligned", "queries", "cache", "one after the other"],
)
def test_kernels_and_which_begin_before_the_one_ahead_has_ended(kind, names, early, monkeypatch):
    """The Hopper kernel only where every row of queries, keys and values has whole 16 bytes."""
    compiler = Compiler(monkeypatch)
    launched = compiler.launches_of(partial(launch_all, **kind))
    assert [name for name, *_ in launched] == names
    assert [name for name, _, (named, _), _ in launched if named["launch_pdl"]] == early


@pytest.mark.parametrize(("queries", "expected"), [(5, FEW), (6, MANY)], ids=["few", "many"])
@pytest.mark.parametrize("known_plan", [None, LEAVES], ids=["device", "host"])
def test_results_of_few_queries_are_merged_many_at_a_time(
    queries, expected, known_plan, monkeypatch
):
    """By the batch alone, so that results do not hang on who planned them."""
    compiler = Compiler(monkeypatch)
    launched = compiler.launches_of(partial(launch_all, queries=queries, known_plan=known_plan))
    (named, _) = launched[-1][2]
    assert (named["BLOCK_P"], named["num_warps"]) == (expected.partials, expected.num_warps)


def test_tensors_beyond_32_bits_are_read_by_the_plain_kernel(monkeypatch):
    """The Hopper kernel counts in units of 16 bytes; a host may lay all layers' pages together."""
    compiler = Compiler(monkeypatch)
    assert both_stages.WIDE_REACH == 2**32 * 16
    pages, page_bytes = 12, 4 * 4 * 256 * 2
    monkeypatch.setattr(both_stages, "WIDE_REACH", pages * page_bytes)
    assert compiler.launches_of(launch_all)[0][0] == "hopper_large_tile_attention"
    for name, width in (("kv_width", 264), ("q_width", 512), ("out_width", 512)):
        launched = compiler.launches_of(partial(launch_all, **{name: width}))
        assert launched[0][0] == "partial_attention"
