"""The fuzzer finds planted faults, keeps failing seeds, and every kept case passes today."""

import json
import os
import time
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from benchmarks.__main__ import app_of
from benchmarks.fuzz import fuzz_run, ties
from benchmarks.fuzz.attention_cases import AttentionFuzzer
from benchmarks.fuzz.attention_settings import AttentionSetting
from benchmarks.fuzz.case_files import CaseFileError, keep, replay
from benchmarks.fuzz.forests import KINDS, Limits, draw_batch
from benchmarks.fuzz.fuzz_process import Job, work
from benchmarks.fuzz.plan_cases import PlanCounts, PlanFuzzer, _same
from benchmarks.fuzz.plan_settings import PlanSetting
from deft_backend import TreeAttention
from deft_backend.forest import forest_from_page_tables, forest_of_blocks
from deft_backend.planner import plan_forest
from deft_backend.policies import get_policy

CPU = torch.device("cpu")
CASES = sorted((Path(__file__).parent / "fuzz_cases").glob("*.json"))
SETTING = PlanSetting(8, 2, 64, 16, 33, (8, 64, 64), 1 << 15)
ATTENTION = AttentionSetting(8, 2, 64, 16, "float32", "int32", 0.0)


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_every_kept_case_passes(path):
    assert replay(path, CPU) == []


def test_every_kind_of_forest_is_drawn():
    limits = Limits(24, 400, 1 << 14)
    found = [draw_batch(np.random.default_rng(seed), 16, limits, twins=True) for seed in range(80)]
    assert {batch.kind for batch in found} == set(KINDS)
    assert any((batch.seq_lens == 0).any() for batch in found)
    for batch in found:
        if batch.monotone:  # the builder refuses tables that are not
            forest_from_page_tables(batch.page_table[batch.rows], batch.seq_lens, 16)


def drawn():
    """A batch with shared nodes."""
    return draw_batch(np.random.default_rng(3), 16, Limits(24, 3000, 1 << 14))


def test_the_walk_finds_shared_query_tokens():
    fuzzer = PlanFuzzer(replace(SETTING, query_tokens=4), CPU, large=False)
    batch = fuzzer.batch(0)
    tables = np.ascontiguousarray(batch.page_table[batch.rows])
    forest = forest_from_page_tables(tables, batch.seq_lens, 16)

    def fault(private_tokens):
        kept = forest_of_blocks(forest, 1, private_tokens)
        plan, _ = plan_forest(kept, get_policy("deft-node"), fuzzer.target, fuzzer.capacity)
        return fuzzer._fault(batch, plan)

    assert fault(4) == ""
    assert fault(0).startswith("several queries share query tokens")


def test_attention_that_reads_wrong_values_fails(monkeypatch):
    fuzzer = AttentionFuzzer(ATTENTION, CPU, large=False)
    assert fuzzer.run([3, 4], "auto").failures == []
    honest = TreeAttention.run

    def other_values(self, q, k, v, *args, **kw):
        return honest(self, q, k, v.nan_to_num().roll(1, 0), *args, **kw)

    monkeypatch.setattr(TreeAttention, "run", other_values)
    failures = fuzzer.run([3, 4], "auto").failures
    assert {failure.seed for failure in failures} == {3, 4}


def test_a_failing_seed_becomes_a_case(tmp_path, monkeypatch):
    monkeypatch.setattr("benchmarks.fuzz.plan_cases.fault_of", lambda *_: "planted")
    found = PlanFuzzer(SETTING, CPU, large=False).run([5]).failures
    assert found[0].why == "planted"
    failure = {"what": "plans", "large": False, "setting": vars(SETTING), **found[0]._asdict()}
    (path,) = keep([failure], tmp_path)
    assert replay(path, CPU) == found
    monkeypatch.undo()
    assert replay(path, CPU) == []


def test_a_file_that_holds_no_case_is_refused(tmp_path):
    path = tmp_path / "case.json"
    path.write_text('{"what": "plans"}')
    with pytest.raises(CaseFileError, match="planner"):
        replay(path, CPU)


def die(job):
    job.now.write_text(
        json.dumps({"what": "plans", "setting": {}, "planner": "device", "seeds": [7, 9]})
    )
    os._exit(3)


def test_a_process_that_dies_is_a_failure_of_its_seeds(monkeypatch):
    monkeypatch.setattr(fuzz_run, "work", die)
    setup = fuzz_run.Fuzz(("plans",), 5.0, 0, 1, 1, 0, "cpu", ("float32",))
    (row,) = fuzz_run.run(setup, lambda line: None)
    (failure,) = row["failures"]
    assert failure["seed"] == 7
    assert "ended with 3" in failure["why"]


def test_a_process_that_has_done_its_work_does_not_hang(tmp_path):
    """It takes a moment to end, however long ago the first process began."""
    job = Job("plans", 0, 1, time.time(), 1, 0, 1, tmp_path, "cpu", ("float32",))
    work(job)
    nothing = SimpleNamespace(is_alive=lambda: True, kill=lambda: None, join=lambda: None)
    assert fuzz_run._ended(job, cast(BaseProcess, nothing), begin=0.0) is None


@pytest.mark.parametrize("what", ["plans", "attention"])
def test_the_command_records_what_it_ran(what, tmp_path):
    out = tmp_path / "fuzz.json"
    options = ["--seconds", "0.1", "--processes", "1", "--what", what, "--out", str(out)]
    options += ["--seed", "2"]  # its first setting has several query tokens
    result = CliRunner().invoke(app_of([]), ["fuzz", *options, "--cases", str(tmp_path / "cases")])
    assert result.exit_code == 0, result.output
    content = json.loads(out.read_text())
    assert content["rows"][0]["plans"] > 0
    kind = {"plans": "several query tokens", "attention": "tree"}[what]
    assert content["rows"][0]["kinds"][kind] > 0
    assert sum(content["rows"][0]["by_planner"].values()) == content["rows"][0]["attention"]
    assert content["rows"][0]["failures"] == []
    assert not (tmp_path / "cases").exists()


def test_a_plan_with_other_items_is_a_tie_or_a_failure(monkeypatch):
    fuzzer = PlanFuzzer(SETTING, CPU, large=False)
    batch = drawn()
    tables = np.ascontiguousarray(batch.page_table[batch.rows])
    forest = forest_from_page_tables(tables, batch.seq_lens, 16)
    host, _ = plan_forest(forest, get_policy("auto"), fuzzer.target, fuzzer.capacity)
    other, _ = plan_forest(forest, get_policy("flash-decoding"), fuzzer.target, fuzzer.capacity)

    def compared(found):
        counts = PlanCounts()
        fuzzer._compare(0, batch, found, counts)
        return counts

    assert (compared(host).same, compared(host).failures) == (1, [])
    assert [failure.why[:6] for failure in compared(other).failures] == ["no tie"]
    # At one of the nearby costs, the host takes the other plan.
    nearby = iter([replace(fuzzer.target, num_sms=1), fuzzer.target])
    monkeypatch.setattr(ties, "nearby_targets", lambda _: nearby)
    monkeypatch.setattr(
        ties, "get_policy", lambda _: get_policy("flash-decoding"),
    )  # fmt: skip
    found = compared(other)
    assert (found.ties, found.same, found.failures) == ([0], 0, [])


def test_a_decision_between_equal_costs_is_a_tie():
    """The price of a partial result at which the host planner decides otherwise, by halving."""
    fuzzer = PlanFuzzer(SETTING, CPU, large=False)
    forest = fuzzer._forest(drawn())

    def planned(partial_ns):
        costs = fuzzer.target.costs
        costs = replace(costs, tiles=replace(costs.tiles, partial_ns=partial_ns))
        target = replace(fuzzer.target, cost_model=costs)
        return target, plan_forest(forest, get_policy("auto"), target, fuzzer.capacity)[0]

    def is_tie(target, host):
        return ties.is_tie(forest, target, fuzzer.capacity, lambda plan: not _same(plan, host))

    low, high = 1e-2, 1e6
    cheapest = planned(low)[1]
    assert not _same(cheapest, planned(high)[1])
    assert not is_tie(*planned(low))
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if _same(cheapest, planned(middle)[1]) else (low, middle)
    assert is_tie(*planned(low))


def test_nearby_costs_differ_by_a_rounding():
    target = SETTING.target()
    for near in ties.nearby_targets(target):
        for one, other in zip(near.tile_costs(), target.tile_costs(), strict=True):
            assert 0 < abs(one / other - 1) <= ties.ROUNDING * 1.01
