"""The fuzzer's attention cases: every kind is drawn, passes, and fails if its part is left out."""

from dataclasses import replace

import pytest
import torch

from benchmarks.fuzz.attention_cases import AttentionFuzzer
from benchmarks.fuzz.attention_settings import (
    DEVICE,
    KV_DTYPES,
    LAYOUTS,
    QUERIES,
    AttentionSetting,
    attention_settings,
)
from benchmarks.fuzz.poisoned_cache import PoisonedCache
from deft_backend import TreeAttention

CPU = torch.device("cpu")
DTYPES = ("bfloat16", "float16", "float32")
SEEDS = range(1, 5)
PLAIN = AttentionSetting(4, 2, 64, 5, "float32", "int32", 0.0)
CHAIN = replace(PLAIN, query_tokens=4)
TREE = replace(PLAIN, query_tokens=5, tree=True)
RAGGED = replace(PLAIN, query_tokens=3, ragged=True)
BYTES = replace(PLAIN, kv_dtype="float8_e4m3fn")


def test_settings_have_every_kind():
    for large in (False, True):
        every = attention_settings(DTYPES, large=large)
        for first in range(0, 30):
            near = every[first : first + 7]
            assert {(one.query_tokens, one.ragged, one.tree) for one in near} == set(QUERIES)
            assert {one.kv_dtype for one in near} == set(KV_DTYPES)
        assert {one.layout for one in every} == set(LAYOUTS)
        assert {one.sinks for one in every} == {"", "float32", "bfloat16"}
        assert {one.tensor_scales for one in every if one.eight_bits} == {False, True}
        assert not any(one.tensor_scales for one in every if not one.eight_bits)
    assert max(one.kv_heads for one in attention_settings(DTYPES, large=False)) == 2


def left_out(name):
    def change(_attention, _lens, options):
        options[name] = {"sinks": None, "logit_cap": 0.0}.get(name, 1.0)

    return change


def flip_a_bit(_attention, _lens, options):
    options["ancestors"] = options["ancestors"] ^ 1


def see_one_more(attention, _lens, options):
    tokens = attention._current.batch.blocks.query_tokens
    requests = attention.forest.batch_size // attention._current.batch.blocks.blocks
    seen = torch.ones(tokens, tokens).tril(1).long() << torch.arange(tokens)
    options["ancestors"] = seen.sum(1)[None, :, None].expand(requests, -1, 1)


def count_one_more(_attention, _lens, options):
    starts = options["query_start"].clone()
    starts[1:-1] = torch.minimum(starts[1:-1] + 1, starts[-1])  # no row lies outside the queries
    options["query_start"] = starts


def forget_growth(attention, lens, _options):
    blocks = attention._current.batch.blocks.blocks
    lens.copy_(torch.from_numpy(attention.forest.seq_lens[::blocks].copy()))


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
    assert fuzzer.run(SEEDS, "auto").failures == []
    honest = TreeAttention.run

    def broken(self, q, k, v, table, lens, **options):
        lens = lens.clone()
        fault(self, lens, options)
        return honest(self, q, k, v, table, lens, **options)

    monkeypatch.setattr(TreeAttention, "run", broken)
    assert fuzzer.run(SEEDS, "auto").failures != []


@pytest.mark.parametrize("planner", [DEVICE, "fasttree"])
@pytest.mark.parametrize("number", range(7))
def test_neighbouring_settings_pass(number, planner):
    setting = attention_settings(DTYPES, large=False)[number]
    found = AttentionFuzzer(setting, CPU, large=False).run([number, number + 1], planner)
    assert found.failures == []
    assert found.kinds[f"layout {setting.layout}"] == 2
    assert found.kinds["tree"] == 2 * setting.tree
    assert found.kinds[setting.kv_dtype] == 2 * setting.eight_bits


@pytest.mark.parametrize("kv_dtype", ["", "float8_e5m2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cache_holds_what_a_batch_may_read(layout, kv_dtype):
    cache = PoisonedCache(replace(PLAIN, layout=layout, kv_dtype=kv_dtype), 8, CPU)
    table, contents = torch.tensor([[3, 1]]), torch.tensor([[3, 6]])
    cache.fill(table, contents, torch.tensor([7]), 0)
    clean, filled = cache.clean.float(), cache.filled.float()
    assert torch.equal(filled[:, 3], clean[:, 3])
    assert torch.equal(filled[:, 1, :2], clean[:, 6, :2])
    assert filled[:, 1, 2:].isnan().all()
    assert filled[:, [0, 2, 4, 5, 6, 7]].isnan().all()
    in_memory = sorted(range(5), key=lambda axis: -cache.filled.stride(axis))
    assert "".join("kpthd"[axis] for axis in in_memory) == layout
