"""A launch never reuses what an earlier launch kept for tensors of another kind."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deft_backend.kernels import Partials, Step, both_stages, configurations, launches, run_plan
from deft_backend.kernels.arguments import Heads
from deft_backend.kernels.configurations import KernelConfiguration, ReduceConfig, TileConfig
from deft_backend.planner import DevicePlan, PlanCapacity
from deft_backend.shapes import QueryBlocks
from drawings import check_asked

KERNELS = (
    configurations.PARTIAL_ATTENTION,
    configurations.SMALL_TILE,
    configurations.HOPPER_LARGE_TILE,
    configurations.HOPPER_SMALL_TILE,
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
    q_width=256,
    out_width=256,
    kv_width=256,
    queries=4,
    sinks=None,
    kv_dtype=None,
    scales="host",
    masked_tiles=False,
    changed=(),
):
    """Both stages over tensors that lie in larger ones: one thing can change without another.

    `changed`: names of tensors, and functions that give others in their place.
    """

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
        torch.zeros(5, columns, dtype=table),
        torch.zeros(queries, dtype=lens),
        torch.zeros(queries, dtype=torch.int32),
        query_start=None,
        ancestors=None,
        sinks=None if sinks is None else torch.zeros(heads, dtype=sinks),
        k_scale=scale,
        v_scale=scale,
        sm_scale=0.1,
        logit_cap=logit_cap,
    )
    partial = Partials(*(torch.zeros(1025)[:1024].view(8, 16, 8) for _ in range(3)))
    for name, change in dict(changed).items():
        if name in ("partial", "lse", "scale"):
            field = name.replace("partial", "out")
            partial = partial._replace(**{field: change(getattr(partial, field))})
        else:
            setattr(step, name, change(getattr(step, name)))
    run_plan(config, PLAN, step, partial, known_plan=known_plan, masked_tiles=masked_tiles)


def moved(tensor):
    """The same view of memory, one element further on."""
    return tensor.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset() + 1)


def wider(dim, by):
    """A change of one stride."""

    def change(tensor):
        strides = [stride + by * (at == dim) for at, stride in enumerate(tensor.stride())]
        return tensor.as_strided(tensor.shape, strides, tensor.storage_offset())

    return change


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
        {"skip": 8},
        {"q_width": 264},
        {"out_width": 264},
        {"kv_width": 264},
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
    for call, expected in zip(calls, alone, strict=True):
        compiler.compiled = 0
        assert compiler.launches_of(call) == expected
        assert compiler.compiled == 0


LARGE, PLAIN, SMALL, REDUCE = (
    "hopper_large_tile_attention",
    "partial_attention",
    "small_tile_attention",
    "reduce_partials",
)


def given(*shape, dtype):
    """In place of None."""
    return lambda _: moved(torch.zeros(64, dtype=dtype)[: torch.Size(shape).numel()].view(shape))


ROWS = ["q", "k_cache", "v_cache", "out", "partial", "lse", "scale"]
OTHERS = {
    "page_table": given(5, 8, dtype=torch.int32),
    **dict.fromkeys(("seq_lens", "table_rows"), given(4, dtype=torch.int32)),
    "query_start": given(5, dtype=torch.int32),
    "ancestors": given(4, 1, 1, dtype=torch.int64),
    "sinks": given(8, dtype=torch.float32),
}


@pytest.mark.parametrize("name", [*ROWS, *OTHERS, "k_scale", "v_scale"])
def test_each_address_alone_decides(name, monkeypatch):
    """The Hopper kernel reads rows of 16 bytes; integers of the batch may lie anywhere.

    Triton looks at an unaligned launch each time, so nothing of it is kept.
    """
    kind = {"changed": {name: OTHERS.get(name, moved)}}
    if name.endswith("_scale"):
        kind |= {"kv_dtype": torch.float8_e4m3fn, "scales": "device"}
        kind["changed"] = {name: given(1, dtype=torch.float32)}
    compiler = Compiler(monkeypatch)
    for _ in range(2):
        compiler.compiled = 0
        launched = compiler.launches_of(partial(launch_all, **kind))
        assert [entry[0] for entry in launched] == [PLAIN if name in ROWS else LARGE, SMALL, REDUCE]
        assert compiler.compiled == 3


@pytest.mark.parametrize(
    ("names", "dim"),
    [*((name, dim) for name in ("q", "out") for dim in (0, 1)), *(("kv", dim) for dim in range(3))],
)
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e5m2])
def test_each_stride_alone_decides(names, dim, kv_dtype, monkeypatch):
    """The Hopper kernel only where every row of queries, keys and values has whole 16 bytes."""
    compiler = Compiler(monkeypatch)
    changed = ("k_cache", "v_cache") if names == "kv" else (names,)
    unit = 16 if names == "kv" and kv_dtype else 8
    for by, expected in ((unit // 2, PLAIN), (unit, LARGE)):
        kind = {"kv_dtype": kv_dtype, "changed": dict.fromkeys(changed, wider(dim, by))}
        assert compiler.launches_of(partial(launch_all, **kind))[0][0] == expected


PROGRAMS = replace(
    CONFIG,
    tiles=(
        replace(TILES[0], waves=2, fewer_programs=((4, 30),), max_registers=99),
        replace(TILES[1], programs_for_one_tile=10),
        replace(TILES[2], programs=40),
    ),
)


def known(*items, merged=1):
    """A plan that the CPU knows, with so many items of each tile shape."""
    return SimpleNamespace(items_of=lambda shape: (7, 7 + items[shape]), reduce_query=[0] * merged)


def test_what_each_launch_is_given(monkeypatch):
    """A batch that fits one tile has fewer programs; a known plan has no more than its items need.

    Groups of four vectors fill a small tile of 8 vectors, and a large one of 64. `launch_pdl` lets
    a launch begin before the one ahead has ended. How many results stage 2 merges at a time depends
    on the batch alone, so that results do not hang on who planned them. A kernel's structures are
    written where they first occur.
    """
    compiler, shown = Compiler(monkeypatch), set()

    def answer(*words):
        kind = {name: eval(value) for name, value in (word.split("=", 1) for word in words)}
        for name, grid, (named, _), _ in compiler.launches_of(partial(launch_all, **kind)):
            of = {key: value for key, value in named.items() if (name, value) not in shown}
            shown.update((name, value) for value in of.values() if isinstance(value, tuple))
            yield f"{name} on {grid[0]}: {', '.join(f'{key} {value}' for key, value in of.items())}"

    check_asked(Path(__file__).with_name("launches.txt"), answer)


@pytest.mark.parametrize(("ragged", "tree"), [(0, 0), (0, 1), (1, 0)])
@pytest.mark.parametrize("tokens", [1, 20])
def test_the_constants_of_heads(tokens, ragged, tree):
    """20 tokens of 6 vectors fill two blocks of a large tile."""
    found = launches.heads_of(12, 2, 96, QueryBlocks.of(tokens, 6), bool(ragged), bool(tree))
    single, held = tokens == 1 and not ragged and not tree, min(tokens, 10)
    blocks = -(-tokens // 10)
    assert found == Heads(
        2, 6, 96, 128, single, tokens, blocks, held, 6 * held, bool(ragged), bool(tree)
    )


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
