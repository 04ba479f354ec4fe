"""Models that mix full attention with other layers, on SGLang: who runs which layer."""

from ast import literal_eval
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sglang_fakes as fakes
from deft_backend.attention import TreeAttention
from deft_backend.hosts.common.limits import Division, LayerShape
from deft_backend.hosts.common.warm_up import Drafts, LayerKind
from deft_backend.hosts.sglang import factory
from deft_backend.hosts.sglang import layers as model_layers
from deft_backend.hosts.sglang.layers import FullCache, divide_layers, divided, full_cache
from deft_backend.hosts.sglang.report import state_of
from deft_backend.hosts.sglang.versions import sinks_of_layers
from drawings import check_asked


def found(pool):
    cache = full_cache(pool)
    assert isinstance(cache, FullCache)
    return cache


def test_the_full_layers_of_each_kind_of_cache():
    plain = fakes.MHATokenToKVPool()
    assert found(plain) == FullCache(plain, None)
    windowed = fakes.SWAKVPool(full=[1, 3], windowed=[0, 2])
    assert found(windowed) == FullCache(windowed.full_kv_pool, {1, 3})
    linear = fakes.HybridLinearKVPool(full=[3, 7])
    assert found(linear) == FullCache(linear.full_kv_pool, {3, 7})
    assert found(linear).keys is linear.full_kv_pool.k


def test_caches_that_tree_attention_cannot_read():
    other = type("MLATokenToKVPool", (fakes.MHATokenToKVPool,), {})
    assert full_cache(other()) == "a KV cache of kind MLATokenToKVPool is not supported"
    mixed = fakes.HybridLinearKVPool(full=[1])
    mixed.full_kv_pool = other()
    assert "HybridLinearKVPool over MLATokenToKVPool is not supported" in str(full_cache(mixed))
    only_windows = fakes.SWAKVPool(full=[], windowed=[0, 1])
    assert "SWAKVPool without full-attention layers" in str(full_cache(only_windows))
    for name, value in (("kv_cache_layout", "hnd"), ("use_hnd", True)):
        packed = fakes.SWAKVPool(full=[0], windowed=[])
        setattr(packed.full_kv_pool, name, value)
        assert "layout hnd" in str(full_cache(packed))


SHAPE = LayerShape(4, 2, 64)
POOLS = {
    "windows": fakes.SWAKVPool,
    "linear": fakes.HybridLinearKVPool,
    "plain": fakes.MHATokenToKVPool,
}
LAYERS = {
    "plain": {},
    "window": {"sliding_window_size": 128},
    "cross": {"is_cross_attention": True},
    "wide": {"qk_head_dim": 128, "v_head_dim": 128},
    "more": {"tp_q_head_num": 8},
    "one": {"tp_q_head_num": 8, "tp_k_head_num": 1, "tp_v_head_num": 1},
}


def test_layers_are_divided_one_by_one():
    """Of a pool for some layers, the kinds of the model's layers, and the recurrent layers' ids;
    tree attention may refuse a number of heads.
    """

    def answer(pool, layers, *rest):
        (name, *ids), kinds = pool.split(":"), layers.split(",")
        made = [fakes.make_layer(layer_id=at, **LAYERS[kind]) for at, kind in enumerate(kinds)]
        given = {name: literal_eval(value) for name, value in (word.split("=") for word in rest)}

        def refused(shape):
            few = shape.num_query_heads == given.get("refused")
            return "few heads" if few else None

        cache = found(POOLS[name](*map(literal_eval, ids)))
        division = divide_layers(made, cache, given.get("others", ()), refused)
        assert not {*division.tree} & {*division.host}
        yield from (f"{at}: {tuple(shape)}" for at, shape in division.tree.items())
        yield from (f"{at}: {reason}" for at, reason in sorted(division.host.items()))

    check_asked(Path(__file__).with_name("divided.txt"), answer)


def test_the_division_in_one_line():
    host = {0: "a sliding window", 2: "a sliding window", 4: "cross attention"}
    assert Division(dict.fromkeys((1, 3), SHAPE), host).text() == (
        "2 of 5 layers decode through tree attention; 2 with a sliding window, 1 with cross "
        "attention through the host's kernels"
    )
    assert Division({0: SHAPE}, {}).text() is None
    assert (SHAPE.gqa_group, LayerShape(9, 2, 64).gqa_group) == (2, 4)


def attention_layer(layer_id, window=-1):
    from sglang.srt.layers.radix_attention import RadixAttention

    return RadixAttention(4, 64, 0.125, 2, layer_id, sliding_window_size=window)


def test_a_model_runner_is_divided_and_counted(host, monkeypatch):
    """The host's own layers are found in the model; counters count the layers with a plan."""
    layers = attention_layer(0, 32), attention_layer(1), attention_layer(2, 32)
    model = torch.nn.ModuleList([*layers, torch.nn.Linear(2, 2)])
    runner = fakes.model_runner(model=model, token_to_kv_pool=fakes.SWAKVPool([1], [0, 2]))
    assert factory.unsupported_model(runner) is None
    division, shape = divided(runner)
    assert shape == (4, 2, 64)
    assert (division.tree, set(division.host)) == ({1: (4, 2, 64)}, {0, 2})
    assert state_of(runner, division, "auto").num_layers == 1
    runner.model = torch.nn.ModuleList([layers[0]])
    with pytest.raises(factory.Unsupported, match="no layer of this model: a sliding window"):
        divided(runner)
    # Models may keep their layers in a dictionary, where nobody finds them.
    hidden = fakes.model_runner()
    hidden.token_to_kv_pool.start_layer = 1
    monkeypatch.setattr(model_layers, "attention_ranks", lambda: 2)
    assert divided(hidden)[0] == Division(dict.fromkeys((0, 1), LayerShape(4, 2, 64)), {})
    monkeypatch.setattr(TreeAttention, "unsupported", lambda *given: "a head count of 4")
    with pytest.raises(factory.Unsupported, match="no layer of this model: a head count of 4"):
        divided(hidden)


def test_a_server_compiles_kernels_for_the_kinds_of_its_layers(host):
    """And for what it verifies."""

    class Block(torch.nn.Module):
        def __init__(self, layer_id, sinks):
            super().__init__()
            self.attn, self.norm = attention_layer(layer_id), torch.nn.Linear(2, 2)
            self.sinks = torch.nn.Parameter(torch.zeros(4)) if sinks else None

    blocks = torch.nn.ModuleList([Block(0, False), Block(1, True)])
    assert sinks_of_layers(blocks) == {1: blocks[1].sinks}
    blocks[0].attn.logit_cap = 30.0
    runner = fakes.model_runner(model=blocks)
    capped, with_sinks = LayerKind(soft_cap=True), LayerKind(sinks=torch.float32)
    for ids, kinds in [((0, 1), {capped, with_sinks}), ((1,), {with_sinks}), ((), {LayerKind()})]:
        tensors = factory._step_tensors(runner, ids)
        assert set(tensors.layers) == kinds
        assert (tensors.drafts, tensors.table_columns) == (None, [6400])
    runner.server_args = SimpleNamespace(
        speculative_algorithm="EAGLE", speculative_num_draft_tokens=6, speculative_eagle_topk=2
    )
    assert factory._step_tensors(runner, ()).drafts == Drafts(6, trees=True, always=True)
