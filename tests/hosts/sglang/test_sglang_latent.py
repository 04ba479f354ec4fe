"""MLA in SGLang: refusals by name, and layers that decode over a plan of latent vectors."""

from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deft_backend.attention import LatentAttention
from deft_backend.attention.reference_attention import reference_attention
from deft_backend.hosts.common.division import Division, LayerShape
from deft_backend.kernels.latent.plain_kernel import plain_latent_attention
from deft_backend.settings.config import Settings
from failure_lines import raising
from sglang_fakes import (
    RADIX_CACHE,
    FakeServer,
    Tree,
    host_planned,
    make_batch,
    make_layer,
    make_state,
    recording_backend,
    requests_of,
)

HEADS, VALUE, ROPE = 4, 64, 32
DRAFTED = 3  # query tokens of a verification
LAYER = {"qk_head_dim": VALUE + ROPE, "v_head_dim": VALUE, "tp_k_head_num": 1, "tp_v_head_num": 1}


class MLATokenToKVPool:
    """A pool of latent vectors for three layers."""

    store_dtype = torch.float32

    def __init__(self, slots=64, dim=VALUE + ROPE):
        self.buffers = torch.randn(3, slots, 1, dim, generator=torch.Generator().manual_seed(0))

    def set_mla_kv_buffer(self, layer, loc, k, k_rope):
        self.buffers[layer.layer_id][loc] = torch.cat([k, k_rope], -1).view(-1, 1, VALUE + ROPE)

    def set_kv_buffer(self, layer, loc, k, v):
        self.buffers[layer.layer_id][loc.loc] = k.view(-1, 1, VALUE + ROPE)

    def get_key_buffer(self, layer_id):
        return self.buffers[layer_id]


@pytest.fixture
def server(host):
    """A backend over a fake host backend that records its calls, with three requests that share."""
    from deft_backend.hosts.sglang.step.latent_layers import LatentLayers

    shared = list(range(1, 9))
    requests, table, lens = requests_of([[*shared, 20], [*shared, 30, 31], shared], Tree())
    calls = []
    own = recording_backend(host, MLATokenToKVPool(), table, calls)()
    attention = LatentAttention(
        num_query_heads=HEADS, dtype=torch.float32, device="cpu", kernel=plain_latent_attention,
        max_batch=4, value_dim=VALUE, rope_dim=ROPE,
    )  # fmt: skip
    division = Division(dict.fromkeys(range(3), LayerShape(HEADS, 1, VALUE + ROPE)), {})
    layers = LatentLayers(own, attention, make_state(), division, model_asks=False)
    loses = SimpleNamespace(answer=False)
    made = host_planned(layers, table, requests, lens, loses=lambda plan, forest: loses.answer)
    made.calls, made.loses = calls, loses
    return made


def expected(server, q, layer):
    keys = server.pool.buffers[layer.layer_id].unsqueeze(1)
    table, lens = torch.from_numpy(server.table[1:]), torch.from_numpy(server.lens)
    out = reference_attention(q, keys, keys, table, lens, sm_scale=layer.scaling)
    return out[..., :VALUE].reshape(3, -1)


def queries(seed):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(3, HEADS, VALUE + ROPE, generator=generator)
    return q, torch.randn(3, 1, VALUE + ROPE, generator=generator)


@pytest.mark.parametrize("in_two", [True, False], ids=["fa3", "torch_native"])
def test_layers_decode_over_the_plan(server, in_two):
    """Queries and keys come in two pieces (and not contiguous), or in one."""
    batch = server.batch()
    server.backend.init_forward_metadata(batch)
    for layer_id in range(3):
        layer = make_layer(layer_id=layer_id, scaling=0.3, **LAYER)
        q, k = queries(layer_id)
        if in_two:
            nope = q[..., :VALUE].transpose(0, 1).contiguous().transpose(0, 1)
            out = server.backend.forward(
                nope, k[..., :VALUE], k[..., :VALUE], layer, batch, q_rope=q[..., VALUE:],
                k_rope=k[..., VALUE:],
            )  # fmt: skip
        else:
            out = server.backend.forward(q.view(3, -1), k.view(3, -1), k[..., :VALUE], layer, batch)
        assert torch.equal(server.pool.buffers[layer_id][batch.out_cache_loc], k)
        torch.testing.assert_close(out.double(), expected(server, q, layer), rtol=1e-5, atol=1e-6)
    assert server.calls == []
    assert server.state.counters().steps_tree == 1


def test_a_graph_lays_out_the_batch_of_its_replay(server):
    """What the capture records computes later batches, whose requests have grown."""
    steps = server.backend.deft
    batch = server.batch()
    steps.takes(batch)
    steps.capture_tree(True)
    captured = SimpleNamespace(**vars(server.batch()))
    server.backend.init_forward_metadata_out_graph(captured, in_capture=True)
    layer = make_layer(scaling=0.3, **LAYER)
    q, k = queries(1)

    def graph():
        server.backend.init_forward_metadata_in_graph(captured)
        return server.backend.forward(q.view(3, -1), k.view(3, -1), k[..., :VALUE], layer, captured)

    assert not graph().isnan().any()
    step = server.layers.step
    steps.capture_tree(False)  # the plan is back
    server.layers.step = step
    torch.testing.assert_close(graph().double(), expected(server, q, layer), rtol=1e-5, atol=1e-6)
    server.lens[:2] -= 1
    torch.testing.assert_close(graph().double(), expected(server, q, layer), rtol=1e-5, atol=1e-6)
    assert "decode" not in server.calls


@pytest.fixture
def verifying(host):
    """A backend that verifies chains of two drafts, over a host backend that records its calls."""
    from deft_backend.hosts.sglang.step.backend import surround
    from deft_backend.hosts.sglang.step.device_planned import DevicePlannedSteps
    from deft_backend.hosts.sglang.step.kinds import Verification
    from deft_backend.hosts.sglang.step.latent_layers import LatentLayers

    prefix = list(range(1000, 3000))
    _, table, lens = requests_of([[*prefix, 1], [*prefix, 2, 3]], Tree(), private=1 + DRAFTED)
    calls = []
    own = recording_backend(host, MLATokenToKVPool(2100), table, calls)()
    attention = LatentAttention(
        num_query_heads=HEADS, dtype=torch.float32, device="cpu", kernel=plain_latent_attention,
        max_batch=4, value_dim=VALUE, rope_dim=ROPE, query_tokens=DRAFTED,
    )  # fmt: skip
    division = Division(dict.fromkeys(range(3), LayerShape(HEADS, 1, VALUE + ROPE)), {})
    layers = LatentLayers(own, attention, make_state(), division, model_asks=False)
    steps = DevicePlannedSteps(
        layers, Settings(min_batch=2), decodes=False,
        verification=Verification(DRAFTED, attention.max_batch, attention.device),
    )  # fmt: skip

    def batch(kind="verify"):
        slots = torch.from_numpy(np.stack(
            [table[row, n - DRAFTED : n] for row, n in zip((1, 2), lens, strict=True)]
        )).flatten()  # fmt: skip
        return make_batch(
            kind, table, [1, 2], lens - DRAFTED, out_cache_loc=slots.long(),
            spec_info=SimpleNamespace(topk=1, draft_token_num=DRAFTED),
        )  # fmt: skip

    return FakeServer(
        backend=surround(own, steps), calls=calls, batch=batch, state=layers.state,
        pool=own.token_to_kv_pool, table=table, lens=lens,
    )  # fmt: skip


@pytest.mark.parametrize("graph", [False, True])
def test_chains_of_drafts(verifying, graph):
    """Each query token sees its request's tokens up to itself; the device planner plans."""
    server, batch = verifying, verifying.batch()
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(2 * DRAFTED, HEADS, VALUE + ROPE, generator=generator)
    k = torch.randn(2 * DRAFTED, 1, VALUE + ROPE, generator=generator)
    if graph:
        server.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        server.backend.init_forward_metadata_in_graph(batch)
    else:
        server.backend.init_forward_metadata(batch)
    for layer_id in range(3):
        layer = make_layer(layer_id=layer_id, scaling=0.3, **LAYER)
        out = server.backend.forward(
            q[..., :VALUE], k[..., :VALUE], k[..., :VALUE], layer, batch, q_rope=q[..., VALUE:],
            k_rope=k[..., VALUE:],
        )  # fmt: skip
        keys = server.pool.buffers[layer_id].unsqueeze(1)
        table, lens = torch.from_numpy(server.table[1:]), torch.from_numpy(server.lens)
        want = reference_attention(q, keys, keys, table, lens, sm_scale=0.3)[..., :VALUE]
        torch.testing.assert_close(out.view(-1, HEADS, VALUE).double(), want, rtol=1e-5, atol=1e-5)
    assert not {"extend", "decode"} & set(server.calls)
    if not graph:
        counters = server.state.counters()
        assert (counters.steps_tree, server.state.verified_tokens) == (1, 2 * DRAFTED)
        assert counters.kv_bytes_read < 0.6 * counters.kv_bytes_query_guided


class Sharing:
    """Leaves batches to the host for `reason`."""

    reason = None

    def too_little(self, forward_batch):
        return self.reason


def test_chains_that_share_too_little_are_the_hosts(verifying):
    steps, calls = verifying.backend.deft, verifying.calls
    steps.sharing = sharing = Sharing()
    sharing.reason = "shares too little"
    verifying.backend.init_forward_metadata(verifying.batch())
    assert calls == ["metadata"]
    assert verifying.state.steps_host == {"shares too little": 1}
    assert steps.layers.step is None


def test_chains_replay_the_graph_that_their_sharing_asks_for(verifying):
    """The host's graph is captured first, then one with tree attention; both find metadata."""
    steps, calls = verifying.backend.deft, verifying.calls
    steps.sharing = sharing = Sharing()
    prepare = verifying.backend.init_forward_metadata_out_graph
    prepare(verifying.batch(), in_capture=True)
    assert steps.layers.step is None
    steps.capture_tree(True)
    prepare(verifying.batch(), in_capture=True)
    assert steps.layers.step is not None
    steps.capture_tree(False)
    assert steps.layers.step is None
    assert calls == ["capture", "replay"]
    for reason, verified, left in (("little", 0, 1), (None, 2 * DRAFTED, 1)):
        sharing.reason = reason
        assert steps.takes(verifying.batch()) == (reason is None)
        prepare(verifying.batch(), in_capture=False)
        assert steps.replayed_tree(None) == (reason is None)
        assert verifying.state.verified_tokens == verified
        assert verifying.state.steps_host == {"little": left}
    assert calls == ["capture", "replay", "replay", "replay"]
    assert not steps.takes(verifying.batch("decode"))


def test_the_radix_tree_and_the_costs_decide_for_chains(failures):
    """Once for the requests of a batch, by the forest that the tree shows."""
    from deft_backend.hosts.sglang.step.decode_plan import BatchObserver
    from deft_backend.hosts.sglang.step.latent_sharing import LatentSharing

    prefix = list(range(1000, 1200))
    requests, table, lens = requests_of([[*prefix, 1], [*prefix, 2, 3]], Tree())
    for request, tokens in zip(requests, lens, strict=True):
        request.seqlen = int(tokens)
    asked, gains = [], SimpleNamespace(answer=False)

    def asks(forest, num_layers):
        asked.append((forest, num_layers))
        return gains.answer

    attention = SimpleNamespace(query_tokens=DRAFTED, device=torch.device("cuda"), gains=asks)
    observer = BatchObserver("runner", verifies=True)
    sharing = LatentSharing(attention, observer, 27)

    def said(requests, kind="verify", cache=RADIX_CACHE):
        batch = make_batch(kind, table, [1, 2], lens, rids=list(requests))
        observer.observe(batch, SimpleNamespace(reqs=requests, tree_cache=cache), "runner")
        return sharing.too_little(batch)

    assert said(requests) == said(list(requests)) == "shares too little to be faster"
    ((forest, layers),) = asked
    assert layers == 27
    assert forest.tokens_attended - forest.tokens_stored == len(prefix)
    assert forest.seq_lens.tolist() == [n + DRAFTED for n in lens]
    gains.answer = True
    assert said(requests[::-1]) is None
    assert said(requests, "decode") == "batch without requests"
    assert said(requests[:1]) == "shares nothing"
    attention.gains = raising(ValueError("planted"))
    assert said(requests) == "planning failed"
    assert said(list(requests)) == "planning failed"
    assert "planted" in failures.pop()
    assert said([object(), requests[0]]) == "planning failed"
    assert "AttributeError" in failures.pop()
    assert said(requests[::-1], cache=object()) == "unreadable prefix cache"
    attention.gains = asks  # EAGLE's and MTP's caches hold bigrams
    of_bigrams = type("RadixCache", (), {**vars(type(RADIX_CACHE)), "is_eagle": True})()
    assert said(requests, cache=of_bigrams) is None


def test_decode_of_a_server_that_verifies_is_the_hosts(verifying):
    batch = verifying.batch("decode")
    verifying.backend.init_forward_metadata(batch)
    assert verifying.calls == ["metadata"]


def test_a_batch_whose_plan_loses_is_the_hosts(server):
    server.loses.answer = True
    server.backend.init_forward_metadata(server.batch())
    assert server.calls == ["metadata"]
    assert server.state.steps_host == {"shares too little to be faster": 1}


def test_layers_of_another_shape_are_the_hosts(server):
    """Such as the layer of the same id with the model's own heads, which serves prefill."""
    batch = server.batch()
    server.backend.init_forward_metadata(batch)
    server.forward(batch, make_layer(layer_id=2), save_kv_cache=False)
    assert server.calls == ["metadata", "decode"]


def test_if_laying_out_fails_the_host_decodes(server, monkeypatch, failures):
    monkeypatch.setattr(server.attention, "lay_out", raising(RuntimeError("planted")))
    batch = server.batch()
    server.backend.init_forward_metadata(batch)
    q, k = queries(1)
    server.backend.forward(q.view(3, -1), k.view(3, -1), k[..., :VALUE], make_layer(**LAYER), batch)
    assert server.calls == ["metadata", "decode"]
    assert "a kernel failed (RuntimeError('planted'))" in failures.pop()


def runner(**changes):
    """A model runner on the CPU with two latent layers, and a prefill layer of the first's id."""
    from sglang.srt.layers.radix_attention import RadixAttention

    class Layer(RadixAttention):
        def __init__(self, **attributes):
            torch.nn.Module.__init__(self)
            vars(self).update(vars(make_layer(**attributes)))

    layers = [Layer(layer_id=i, **{**LAYER, **changes.pop(f"layer{i}", {})}) for i in range(2)]
    made = SimpleNamespace(
        token_to_kv_pool=MLATokenToKVPool(), dtype=torch.float32, kv_cache_dtype=torch.float32,
        device="cpu", model=torch.nn.ModuleList([*layers, Layer(layer_id=0)]),
    )  # fmt: skip
    return SimpleNamespace(**{**vars(made), **changes})


def test_a_model_runner_gets_latent_attention(host):
    from deft_backend.hosts.sglang.start.latent import is_latent, latent_attention

    assert is_latent(runner())
    attention, division = latent_attention(runner(), 4, 1, Settings())
    assert (attention.shape.num_query_heads, attention.shape.latent_dim) == (HEADS, VALUE + ROPE)
    assert list(division.tree) == [0, 1]


def test_a_model_runner_is_refused_unless_asked(host):
    from deft_backend.hosts.common.limits import Unsupported
    from deft_backend.hosts.sglang.start import factory

    made = runner(req_to_token_pool=SimpleNamespace(size=4))
    with pytest.raises(Unsupported, match="DEFT_MLA=1"):
        factory._create(made, None, Settings(), ExitStack())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_cache_dtype": torch.float8_e4m3fn}, "MLA over KV in torch.float8_e4m3fn"),
        ({"layer1": {"sliding_window_size": 128}}, "MLA with a sliding window"),
        ({"layer1": {"logit_cap": 30.0}}, "MLA with a soft cap"),
        ({"layer1": {"tp_q_head_num": 8}}, "MLA in 2 shapes"),
        ({f"layer{i}": {"tp_q_head_num": 64} for i in range(2)}, "sharing would gain nothing"),
    ],
)
def test_model_runners_that_are_refused(host, changes, reason):
    from deft_backend.hosts.common.limits import Unsupported
    from deft_backend.hosts.sglang.start.latent import latent_attention

    with pytest.raises(Unsupported, match=reason):
        latent_attention(runner(**changes), 4, 1, Settings())
