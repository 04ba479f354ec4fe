"""The fuzzer: its strategies find planted faults, and every kept example passes today."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.__main__ import app_of
from benchmarks.fuzz.attention_cases import AttentionFuzzer
from benchmarks.fuzz.attention_settings import AttentionSetting
from benchmarks.fuzz.examples import Runner, example_of
from deft_backend import TreeAttention

CPU = torch.device("cpu")
CASES = json.loads((Path(__file__).parent / "fuzz_cases.json").read_text())
PLAIN = AttentionSetting(4, 2, 64, 5, "float32", "int32", 0.0)
CHAIN = replace(PLAIN, query_tokens=4)
TREE = replace(PLAIN, query_tokens=5, tree=True)
RAGGED = replace(PLAIN, query_tokens=3, ragged=True)
BYTES = replace(PLAIN, kv_dtype="float8_e4m3fn")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["why"][:40])
def test_every_kept_example_passes(case):
    example = example_of(case)
    assert example_of(example.to_dict()) == example
    assert Runner(CPU).run(example) == []


def test_the_command_records_what_it_ran(tmp_path):
    out = tmp_path / "fuzz.json"
    done = CliRunner().invoke(app_of(["fuzz"]), ["fuzz", "--seconds", "0.1", "--out", str(out)])
    assert done.exit_code == 0, done.output
    (row,) = json.loads(out.read_text())["rows"]
    assert sum(row["by_planner"].values()) == row["plans"] > 0
    assert row["failures"] == []


def left_out(name):
    def change(_attention, _lens, options):
        options[name] = {"sinks": None, "logit_cap": 0.0}.get(name, 1.0)

    return change


def flip_a_bit(_attention, _lens, options):
    options["ancestors"] = options["ancestors"] ^ 1


def see_one_more(attention, _lens, options):
    tokens = attention.batch.blocks.query_tokens
    requests = attention.batch.forest.batch_size // attention.batch.blocks.blocks
    seen = torch.ones(tokens, tokens).tril(1).long() << torch.arange(tokens)
    options["ancestors"] = seen.sum(1)[None, :, None].expand(requests, -1, 1)


def count_one_more(_attention, _lens, options):
    starts = options["query_start"].clone()
    starts[1:-1] = torch.minimum(starts[1:-1] + 1, starts[-1])  # no row lies outside the queries
    options["query_start"] = starts


def forget_growth(attention, lens, _options):
    blocks = attention.batch.blocks.blocks
    lens.copy_(torch.from_numpy(attention.batch.forest.seq_lens[::blocks].copy()))


@pytest.mark.parametrize(
    ("setting", "fault"),
    [
        (BYTES, left_out("k_scale")),
        (BYTES, left_out("v_scale")),
        (replace(BYTES, kv_dtype="float8_e5m2", tensor_scales=True), left_out("v_scale")),
        (replace(PLAIN, sinks="bfloat16"), left_out("sinks")),
        (replace(PLAIN, soft_cap=1.0), left_out("logit_cap")),
        (TREE, flip_a_bit),
        (replace(TREE, query_tokens=70), flip_a_bit),
        (CHAIN, see_one_more),
        (RAGGED, count_one_more),
        (PLAIN, forget_growth),
        (CHAIN, forget_growth),
    ],
)
def test_each_kind_can_fail(setting, fault, monkeypatch):
    fuzzer = AttentionFuzzer(setting, CPU, large=False)
    assert fuzzer.run(range(1, 5), "auto")[0] == []
    honest = TreeAttention.run

    def broken(self, q, k, v, table, lens, **options):
        lens = lens.clone()
        fault(self, lens, options)
        return honest(self, q, k, v, table, lens, **options)

    monkeypatch.setattr(TreeAttention, "run", broken)
    assert fuzzer.run(range(1, 5), "auto")[0] != []
