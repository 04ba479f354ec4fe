"""`deft tune`: the search for costs, the tables' keys and files, the command."""

import json
import re
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from commands import run
from cost_keys import KEY
from deft_backend.attention.reference_attention import reference_attention, relative_error
from deft_backend.costs import CostModel
from deft_backend.costs.cost_model import default_cost_model
from deft_backend.costs.table_lookup import save_table, table_in_use, table_key
from deft_backend.costs.tables import GpuFacts, read_key
from deft_backend.forest import build_forest
from deft_backend.shapes import DTYPE_BYTES, TILE_SEGMENTS, AttentionShape
from deft_backend.tools.tuning import measure as measure_module
from drawings import check_drawn


def _trials(page_size, clock, descriptions, kv_dtype=torch.float16):
    shape = AttentionShape(
        4, 2, 64, torch.float16, kv_dtype, device=torch.device("cpu"), page_size=page_size
    )
    return measure_module.Trials(shape, clock, descriptions)


@pytest.mark.parametrize(("page_size", "dtype"), [(1, "float16"), (16, "float8_e4m3fn")])
def test_a_rehearsal_of_the_whole_measurement(page_size, dtype, tmp_path):
    """Every launch runs in the interpreter; only the times are invented."""
    launches = 0

    def clock(launch):
        nonlocal launches
        launches += 1
        assert launch().isfinite().all()
        return 10.0 + launches % 7

    key = replace(KEY, query_heads=4, kv_heads=2, head_dim=64, page_size=page_size, dtype=dtype)
    before = replace(default_cost_model(), bandwidth_gb_s=999.0)
    trials = _trials(page_size, clock, ["1 9", "1,3 8,2"], getattr(torch, dtype))
    assert {cache.dtype for cache in trials.kv} == {getattr(torch, dtype)}
    assert sum(cache.nbytes for cache in trials.kv) == 4 << 20  # a quarter of what is free
    tuned = measure_module.search(trials, before, 1234.0)
    assert launches == tuned.plans >= 2  # equal plans share a measurement
    np.testing.assert_array_equal(tuned.model.time_ms, before.time_ms)  # FlashForge's
    assert tuned.model.fasttree == before.fasttree
    assert tuned.model.bandwidth_gb_s in (999.0, 1234.0)
    assert tuned.batches == 2
    assert tuned.ratio <= 1.0
    assert len(tuned.model.tiles.item_ns) == TILE_SEGMENTS.count(1)
    save_table(tuned.model, key, tmp_path / key.file_name)
    assert table_in_use(key, tmp_path).tuned


@pytest.mark.parametrize(
    ("dtype", "queries"), [("float16", "float16"), ("float8_e5m2", "bfloat16")]
)
def test_tuning_starts_from_the_table_in_use(dtype, queries, monkeypatch):
    origin, said = {"device": "D", "commit": "c", "date": "today"}, []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(measure_module, "read_gb_s", lambda: 1234.5678)
    monkeypatch.setattr(measure_module, "provenance", lambda: origin)
    monkeypatch.setattr(measure_module, "Trials", lambda *given: given)
    monkeypatch.setattr(measure_module, "search", lambda *given: given)
    key, before = replace(KEY, dtype=dtype, head_dim=96), default_cost_model()
    (shape, clock, names), kept, bandwidth = measure_module.tune(key, before, said.append)
    heads = key.query_heads, key.kv_heads, 96
    types = getattr(torch, queries), getattr(torch, dtype), torch.device("cuda", 1)
    assert shape == AttentionShape(*heads, *types, key.page_size)
    assert clock is measure_module.gpu_clock
    assert names == measure_module.UNSHARED + measure_module.SHARED
    kind = f"deft tune on D, {key.shape}; torch {key.torch}, triton {key.triton}, deft-backend "
    expected = replace(before, head_dim=96, source=f"{kind}{key.package} (c), today")
    assert kept.to_dict() == expected.to_dict()
    assert (bandwidth, said) == (1235.0, ["memory bandwidth", "plans of whole batches"])


def test_times_are_medians_with_a_cold_cache(monkeypatch):
    """Triton's own benchmark flushes the cache; the largest of three readings is the bandwidth."""
    benched, graphs = [], []
    zeros = torch.zeros

    def do_bench(work, **given):
        benched.append((work(), given))
        return 4.25 - len(benched)

    class Graph:
        def replay(self):
            return "replayed"

    @contextmanager
    def graph(made):
        graphs.append(made)
        yield

    monkeypatch.setattr(measure_module.triton.testing, "do_bench", do_bench)
    monkeypatch.setattr(torch, "zeros", lambda size, **given: given and zeros(size >> 28) + 1)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: graphs.append("synchronized"))
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    assert measure_module.read_gb_s() == pytest.approx((4 << 30) / 1.25 / 1e6)
    assert [found.tolist() for found, _ in benched] == [4.0, 1.0, [1.0, 1.0]]
    given = {"warmup": 25, "rep": 100, "return_mode": "median"}
    assert [each for _, each in benched] == [given] * 3
    launches = []
    assert measure_module.gpu_clock(lambda: launches.append(1)) == 250.0
    assert (len(launches), graphs[0], type(graphs[1])) == (2, "synchronized", Graph)
    assert benched[3] == ("replayed", {"warmup": 10, "rep": 20, "return_mode": "median"})


class MadeUpTrials:
    """Times by a formula of the costs: fastest where the large tile's item takes 700 ns."""

    names = ("a", "b")

    def __init__(self, best_ns):
        self.best_ns, self.plans = best_ns, 0

    def times_us(self, model):
        self.plans += 1
        off = abs(np.log(model.tiles.item_ns[1] / self.best_ns))
        return {"a": 10.0 + off, "b": 50.0}


def test_the_search_finds_better_costs_and_never_takes_slower_plans():
    model, trials = default_cost_model(), MadeUpTrials(700.0)
    before = replace(model, tiles=replace(model.tiles, item_ns=(5300.0, 2000.0)))
    found = measure_module.search(MadeUpTrials(2000.0), before, 321.0)
    assert (found.model, found.ratio) == (before, 1.0)
    found = measure_module.search(trials, before, 321.0)
    item = found.model.tiles.item_ns[1]
    assert item == pytest.approx(700.0, rel=0.02)
    assert found.model.tiles.item_ns[0] == 5300.0
    off = 10.0 + abs(np.log(item / 700))
    assert found.ratio == pytest.approx((off / (10.0 + np.log(2000 / 700))) ** 0.5)
    assert found.batches == 2
    assert found.plans == trials.plans


def test_trials_run_the_batch_that_they_name(monkeypatch):
    """Each plan is right, and tables that lead to one plan share one measurement."""
    seen = []
    real = measure_module.TreeAttention.run

    def run(self, q, *rest, **options):
        assert options["static_launch"]
        seen.append((q, *rest))
        return real(self, q, *rest, **options)

    monkeypatch.setattr(measure_module.TreeAttention, "run", run)
    clocked = 0

    def clock(launch):
        nonlocal clocked
        clocked += 1
        out = launch()
        q, k, v, table, lens = seen[-1]
        assert relative_error(out, reference_attention(q, k, v, table, lens)) < 1e-3
        return 5.0 + clocked

    table = measure_module._page_table(build_forest([1, 0], [5], [9, 6]), 4)
    assert table.tolist() == [[0, 3, 4], [0, 2, 0]]  # request 1 comes first
    trials = _trials(4, clock, ["2 9", "1,3 13,2", "1 999999"])
    assert trials.names == ["2 9", "1,3 13,2"]  # the last needs more KV than there is
    times = trials.times_us(default_cost_model())
    assert times == {"2 9": 6.0, "1,3 13,2": 7.0}
    assert trials.times_us(replace(default_cost_model(), source="same plans")) == times
    assert (clocked, trials.plans) == (2, 2)
    table, lens = seen[-1][3:5]
    assert lens.tolist() == [15, 15, 15]
    assert (table[:, :3] == table[0, :3]).all()  # pages of the root, all full
    assert len(set(table[:, -1].tolist())) == 3


@pytest.mark.parametrize("dtype", [name for name in DTYPE_BYTES if name != "float32"])
def test_the_command_in_a_message_asks_for_the_table_of_its_key(dtype, tmp_path, monkeypatch):
    """A GPU without a table, also with a cache of 8 bits: the log's command names the same key."""
    gpu = "NVIDIA L40S"
    _on(gpu, monkeypatch)
    key = replace(KEY, gpu=gpu, dtype=dtype, query_heads=12, kv_heads=2, page_size=64)
    notice = table_in_use(key, tmp_path, GpuFacts(142, 2520.0, 864.0)).notice
    assert notice.endswith(key.command)
    command = key.command.split()[1:]
    code, out, _ = run(*command, "--show", DEFT_CACHE_DIR=str(tmp_path))
    assert code == 0
    assert out.startswith(f"{gpu}: {key.shape}")


def _on(gpu, monkeypatch):
    monkeypatch.setattr("deft_backend.tools.servers.command.num_gpus", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: gpu)
    facts = GpuFacts(sms=142, sm_clock_mhz=2520.0, memory_gb_s=864.0)
    monkeypatch.setattr("deft_backend.costs.tables.gpu_facts", lambda device: facts)


def test_the_command_is_as_drawn(tmp_path, monkeypatch):
    config = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))

    def tune(key, before, say):
        say("measuring")
        if key.query_heads == 1:
            raise torch.OutOfMemoryError("of 2 GiB")
        if key.head_dim == 64:
            return measure_module.Tuned(replace(before, source="made up"), 0.9, 30, 19)
        return measure_module.Tuned(before, 1.0, 1, 2)

    _on("NVIDIA L40S", monkeypatch)
    monkeypatch.setattr(measure_module, "tune", tune)
    clock = SimpleNamespace(perf_counter=count(7.0, 2.0).__next__)
    monkeypatch.setattr("deft_backend.cli.tune.time", clock)
    path, every = Path(__file__).with_name("tune.txt"), []
    for line in path.read_text().splitlines():
        if line.startswith("$ deft "):
            words = line[7:].replace("TMP", str(tmp_path)).split()
            code, out, err = run(*words, DEFT_CACHE_DIR=str(tmp_path / "cache"))
            every += [line, f"exit code {code}", f"{err}{out}".replace(str(tmp_path), "TMP")]
    text = "\n".join(every).replace(str(Path(__file__).parents[3]), "ROOT")
    check_drawn(re.sub("-[0-9a-f]{12}[.]json", "-KEY.json", text), path)
    (written,) = (tmp_path / "cache" / "tables").glob("*-16x4-*.json")
    assert read_key(written) == replace(
        table_key(AttentionShape(16, 4, 64, *[torch.bfloat16] * 2, torch.device("cuda"), 16)),
        gpu="NVIDIA L40S",
    )
    assert CostModel.load(written).source == "made up"
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "tables").touch()
    code, _, said = run("tune", DEFT_CACHE_DIR=str(tmp_path / "full"))
    assert (code, "File exists; set DEFT_CACHE_DIR" in said) == (2, True)
