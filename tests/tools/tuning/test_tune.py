"""`deft tune`: fits on times with known constants, the tables' keys and files, the command."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from commands import run
from deft_backend.attention.reference_attention import reference_attention, relative_error
from deft_backend.costs import CostModel, table_lookup
from deft_backend.costs.cost_model import default_cost_model
from deft_backend.costs.table_lookup import save_table, table_in_use
from deft_backend.costs.tables import (
    GpuFacts,
    TableKey,
    read_key,
)
from deft_backend.policies import Target
from deft_backend.shapes import DTYPE_BYTES, TILE_SEGMENTS, AttentionShape
from deft_backend.tools.tuning import machine as machine_module
from deft_backend.tools.tuning.machine import Machine, Trials, Work
from deft_backend.tools.tuning.measure import (
    Grid,
    SearchResult,
    fit,
    measure,
    measure_tile_costs,
    search,
)

KEY = TableKey(
    gpu="NVIDIA A100-SXM4-40GB",
    package="1.2.3",
    kernels="0123",
    torch="2.11.0",
    triton="3.6.0",
    query_heads=32,
    kv_heads=8,
    head_dim=128,
    dtype="float16",
    page_size=1,
)
TARGET = Target(32, 8, 128)


@pytest.fixture(autouse=True)
def _forgotten_warnings():
    table_lookup._warn_once.cache_clear()


# --- fits ----------------------------------------------------------------------------------------


def test_least_squares_finds_exact_coefficients_and_no_negative_ones():
    rng = np.random.default_rng(0)
    features = rng.uniform(0.5, 2.0, (30, 3))
    found, error = fit(features, features @ [3.0, 0.0, 0.25])
    np.testing.assert_allclose(found, [3.0, 0.0, 0.25], atol=1e-9)
    assert error < 1e-9
    # The unconstrained optimum of these has a negative second coefficient.
    line = np.stack([np.ones(20), np.arange(20.0)], axis=1)
    found, error = fit(line, 100.0 - np.arange(20.0))
    assert found[1] == 0.0
    # A constant c alone: relative errors c / t - 1 are least for c = sum(1/t) / sum(1/t²).
    times = 100.0 - np.arange(20.0)
    assert found[0] == pytest.approx((1 / times).sum() / (1 / times**2).sum())
    assert 0.0 < error < 0.1


@pytest.mark.parametrize("target", [TARGET, Target(16, 1, 64), Target(32, 32, 128)])
def test_tile_costs_are_recovered(target):
    item, token = (5800.0, 5000.0), (60.0, 28.0)

    def time_us(work):
        shape = next(s for s, held in enumerate(target.single_range_tiles) if held >= work.queries)
        assert work.resident
        rounds = -(-work.groups // target.tile_programs[shape])
        nanoseconds = 3000.0 + rounds * (item[shape] + work.tokens * token[shape])
        if work.parts > 1:
            nanoseconds += 2500.0 + 8.4 * work.groups * work.queries
        return nanoseconds / 1e3

    costs, errors = measure_tile_costs(time_us, target, Grid())
    for shape, held in enumerate(target.single_range_tiles):
        if held > 0:  # a tile lower than a GQA group is never used
            assert costs.item_ns[shape] == pytest.approx(item[shape], rel=1e-3)
            assert costs.token_ns[shape] == pytest.approx(token[shape], rel=1e-3)
    assert len(costs.item_ns) == len(target.single_range_tiles)
    assert costs.partial_ns == pytest.approx(8.4, rel=1e-3)
    assert costs.reduce_ns == pytest.approx(2500.0, rel=1e-3)
    assert max(errors.values()) < 1e-6


# --- measuring code, executed --------------------------------------------------------------------

TINY = Grid(
    tile_tokens=(4, 8),
    tile_rounds=(1, 2),
    result_counts=(4,),
    result_parts=(2,),
    trials=("1 9", "1,3 8,2"),
)


def _machine(page_size, clock, kv_dtype=torch.float16):
    cpu = torch.device("cpu")
    return Machine(AttentionShape(4, 2, 64, torch.float16, kv_dtype, cpu, page_size), clock)


@pytest.mark.parametrize(("page_size", "dtype"), [(1, "float16"), (16, "float8_e4m3fn")])
def test_a_rehearsal_of_the_whole_measurement(page_size, dtype, tmp_path):
    """Every launch runs in the interpreter; only the times are invented."""
    launches = 0

    def clock(launch):
        nonlocal launches
        launches += 1
        assert launch().isfinite().all()
        return 10.0 + launches % 7

    said = []
    key = replace(KEY, query_heads=4, kv_heads=2, head_dim=64, page_size=page_size, dtype=dtype)
    before = replace(default_cost_model(), bandwidth_gb_s=999.0)
    machine = _machine(page_size, clock, getattr(torch, dtype))
    assert {cache.dtype for cache in machine.kv} == {getattr(torch, dtype)}
    tuned = measure(machine, key, before, TINY, lambda: 1234.4, said.append)
    assert launches > 10
    assert list(tuned.seconds) == said
    assert {"small tile", "partial results"} <= set(tuned.errors)
    np.testing.assert_array_equal(tuned.model.time_ms, before.time_ms)  # FlashForge's
    assert tuned.model.fasttree == before.fasttree
    assert tuned.model.bandwidth_gb_s == (1234.0 if tuned.best.start else 999.0)
    assert tuned.best.batches == 2
    assert tuned.best.ratio <= 1.0
    assert tuned.model.head_dim == 64
    assert len(tuned.model.tiles.item_ns) == TILE_SEGMENTS.count(1)
    assert key.shape in tuned.model.source
    save_table(tuned.model, key, tmp_path / key.file_name)
    assert table_in_use(key, tmp_path).tuned


@pytest.mark.parametrize("resident", [False, True])
@pytest.mark.parametrize(("queries", "parts"), [(1, 1), (3, 1), (2, 4)])
def test_launches_are_the_attention_that_they_stand_for(queries, parts, resident, monkeypatch):
    """The timed launches are right: every query attends to its own context, in the given parts."""
    seen = {}
    real = machine_module.TreeAttention.run

    def run(self, q, k, v, *rest, **options):
        table, lens = rest
        rows = options["table_rows"].long()
        seen.update(expected=reference_attention(q, k, v, table[rows], lens))
        seen.update(plan=self.last_plan)
        return real(self, q, k, v, *rest, **options)

    monkeypatch.setattr(machine_module.TreeAttention, "run", run)
    work = Work(groups=4, queries=queries, tokens=21, parts=parts, resident=resident)
    out = _machine(16, lambda launch: 1.0).launch(work)()
    assert out.shape[0] == 4 // parts * queries
    assert relative_error(out, seen["expected"]) < 1e-3
    assert seen["plan"].num_partials == work.results
    assert work.results == (4 * queries if parts > 1 else 0)


# --- the search ----------------------------------------------------------------------------------


class MadeUpTrials:
    """Times by a formula of the costs: fastest where the large tile's item takes 700 ns."""

    names = ("a", "b")

    def __init__(self, best_ns):
        self.best_ns, self.plans = best_ns, 0

    def times_us(self, model):
        self.plans += 1
        off = abs(np.log(model.tiles.item_ns[1] / self.best_ns))
        return {"a": 10.0 + off, "b": 50.0}


def _with_item(nanoseconds):
    model = default_cost_model()
    return replace(model, tiles=replace(model.tiles, item_ns=(5300.0, nanoseconds)))


def test_the_search_never_takes_slower_plans():
    before = _with_item(2000.0)
    found = search(MadeUpTrials(2000.0), [before, _with_item(4000.0)])
    assert (found.model, found.ratio, found.start) == (before, 1.0, 0)


def test_the_search_finds_better_costs_from_the_better_start():
    before, measured = _with_item(2000.0), _with_item(1000.0)
    trials = MadeUpTrials(700.0)
    found = search(trials, [before, measured])
    assert found.model.tiles.item_ns == (5300.0, 700.0)
    assert found.start == 1
    assert found.ratio == pytest.approx((10.0 / (10.0 + np.log(2000 / 700))) ** 0.5)
    assert found.batches == 2
    assert found.plans == trials.plans


def test_trials_run_the_batch_that_they_name(monkeypatch):
    """Each plan is right, and tables that lead to one plan share one measurement."""
    seen = []
    real = machine_module.TreeAttention.run

    def run(self, q, *rest, **options):
        assert options["static_launch"]
        seen.append((q, *rest))
        return real(self, q, *rest, **options)

    monkeypatch.setattr(machine_module.TreeAttention, "run", run)
    clocked = 0

    def clock(launch):
        nonlocal clocked
        clocked += 1
        out = launch()
        q, k, v, table, lens = seen[-1]
        assert relative_error(out, reference_attention(q, k, v, table, lens)) < 1e-3
        return 5.0 + clocked

    trials = Trials(_machine(4, clock), ["2 9", "1,3 13,2", "1 999999"])
    assert trials.names == ["2 9", "1,3 13,2"]  # the last needs more KV than there is
    times = trials.times_us(default_cost_model())
    assert times == {"2 9": 6.0, "1,3 13,2": 7.0}
    assert trials.times_us(replace(default_cost_model(), source="same plans")) == times
    assert (clocked, trials.plans) == (2, 2)
    table, lens = seen[-1][3:5]
    assert lens.tolist() == [15, 15, 15]
    assert (table[:, :3] == table[0, :3]).all()  # pages of the root, all full
    assert len(set(table[:, -1].tolist())) == 3


# --- the command ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [name for name in DTYPE_BYTES if name != "float32"])
def test_the_command_in_a_message_asks_for_the_table_of_its_key(dtype, tmp_path, monkeypatch):
    """A GPU without a table, also with a cache of 8 bits: the log's command names the same key."""
    gpu = "NVIDIA L40S"
    _on(gpu, monkeypatch)
    key = replace(KEY, gpu=gpu, dtype=dtype, query_heads=12, kv_heads=2, page_size=64)
    notice = table_in_use(key, tmp_path, GpuFacts(142, 2520.0, 864.0)).notice
    assert notice is not None
    assert notice.endswith(key.command)
    command = key.command.split()[1:]
    code, out, _ = run(*command, "--show", DEFT_CACHE_DIR=str(tmp_path))
    assert code == 0
    assert out.startswith(f"{gpu}: {key.shape}")


def _on(gpu, monkeypatch):
    from deft_backend.costs import table_lookup as device_tables

    monkeypatch.setattr("deft_backend.tools.servers.command.num_gpus", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(device_tables.torch.cuda, "get_device_name", lambda device: gpu)
    facts = GpuFacts(sms=142, sm_clock_mhz=2520.0, memory_gb_s=864.0)
    monkeypatch.setattr("deft_backend.costs.tables.gpu_facts", lambda device: facts)


def test_tune_writes_and_shows_the_table(tmp_path, monkeypatch):
    """The command end to end, without the measurement."""
    from deft_backend.tools.tuning import measure as measure_module

    model = tmp_path / "model"
    model.mkdir()
    config = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
    (model / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    _on("NVIDIA L40S", monkeypatch)
    asked = []

    def tune(key, before, say):
        asked.append(key)
        assert before.bandwidth_gb_s < 1000.0  # derived from this GPU's facts
        measured = replace(default_cost_model(), source="made up", bandwidth_gb_s=321.0)
        found = SearchResult(measured, 0.9, 1, 30, 19)
        return measure_module.Tuned(measured, {"small tile": 0.01}, {"part": 1.0}, found)

    monkeypatch.setattr(measure_module, "tune", tune)
    where = {"DEFT_CACHE_DIR": str(tmp_path / "cache")}
    code, out, _ = run("tune", "--show", "--model", str(model), **where)
    assert (code, "shipped table" in out, "none was measured on this NVIDIA L40S" in out) == (
        0,
        True,
        True,
    )
    code, out, _ = run("tune", "--model", str(model), "--page-size", "16", **where)
    (key,) = asked
    assert code == 0
    assert (key.query_heads, key.kv_heads, key.head_dim) == (16, 4, 64)
    assert (key.dtype, key.page_size, key.gpu) == ("bfloat16", 16, "NVIDIA L40S")
    path = tmp_path / "cache" / "tables" / key.file_name
    assert str(path) in out
    assert "part: 1.0 s" in out
    assert "19 batches, 30 different plans: attention takes 10.0% less time" in out
    assert read_key(path) == key
    assert CostModel.load(path).source == "made up"
    shape = ("--model", str(model), "--page-size", "16")
    code, out, _ = run("tune", "--show", *shape, **where)
    assert (code, "tuned table" in out, "321 GB/s" in out) == (0, True, True)
    code, _, _ = run("tune", *shape, "--dtype", "fp16", "--out", str(tmp_path / "o.json"), **where)
    assert (code, read_key(tmp_path / "o.json").dtype) == (0, "float16")
    code, _, err = run("tune", *shape, "--out", str(model / "config.json" / "x"), **where)
    assert (code, "cannot write" in err) == (2, True)
