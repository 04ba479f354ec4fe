"""MLA in SGLang: refusals by name, and layers that decode over a plan of latent vectors."""

import sys
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch

import sglang_fakes as fakes
from attention_checks import latent_attention
from deft_backend.attention.reference_attention import reference_attention
from deft_backend.hosts.common.limits import Division, LayerShape, Unsupported
from deft_backend.hosts.sglang import factory, latent
from deft_backend.hosts.sglang.prefixes import BatchObserver
from deft_backend.hosts.sglang.step_inputs import Verification
from deft_backend.settings.config import Settings
from failure_lines import raising
from flash_attention_3 import attend, check_answers

HEADS, VALUE, ROPE = 4, 64, 32
DRAFTED = 3  # query tokens of a verification
LAYER = {"qk_head_dim": VALUE + ROPE, "v_head_dim": VALUE, "tp_k_head_num": 1, "tp_v_head_num": 1}


class MLATokenToKVPool:
    """A pool of latent vectors for three layers."""

    store_dtype = torch.float32

    def __init__(self, slots=64):
        self.buffers = torch.randn(
            3, slots, 1, VALUE + ROPE, generator=torch.Generator().manual_seed(0)
        )

    def set_mla_kv_buffer(self, layer, loc, k, k_rope):
        self.buffers[layer.layer_id][loc] = torch.cat([k, k_rope], -1).view(-1, 1, VALUE + ROPE)

    def set_kv_buffer(self, layer, loc, k, v):
        self.buffers[layer.layer_id][loc.loc] = k.view(-1, 1, VALUE + ROPE)

    def get_key_buffer(self, layer_id):
        return self.buffers[layer_id]


def latent_server(host, tokens=1):
    """Batches of two requests that share 2,000 tokens; each has so many query tokens: a chain of
    drafts if it is not one.
    """
    prefix = list(range(1000, 3000))
    _, table, lens = fakes.requests_of([[*prefix, 1], [*prefix, 2, 3]], private=1 + tokens)
    own = fakes.recording_backend(host, MLATokenToKVPool(2100), table)()
    dims = {"value_dim": VALUE, "rope_dim": ROPE}
    attention = latent_attention(max_batch=4, query_tokens=tokens, **dims)
    verification = Verification(tokens, 4, attention.device) if tokens > 1 else None

    def layers(*given):
        division = Division(dict.fromkeys(range(3), LayerShape(HEADS, 1, VALUE + ROPE)), {})
        return latent.LatentLayers(*given, fakes.make_state(), division)

    def batch(kind="decode" if tokens == 1 else "verify"):
        drafts = SimpleNamespace(topk=1, draft_token_num=tokens)
        return fakes.make_batch(kind, table, [1, 2], lens, tokens, spec_info=drafts)

    of_steps = {"verification": verification, "decodes": tokens == 1}
    server = fakes.FakeServer(own, attention, batch, layers, **of_steps)
    server.lens = lens
    return server


@pytest.mark.parametrize(
    ("tokens", "in_two", "graph"),
    [
        pytest.param(1, True, False, id="fa3"),
        pytest.param(1, False, False, id="torch_native"),
        pytest.param(DRAFTED, True, False, id="chains"),
        pytest.param(DRAFTED, True, True, id="chains in a graph"),
    ],
)
def test_layers_run_over_the_plan(host, tokens, in_two, graph):
    """Each query token sees its request's tokens up to itself. Queries and keys come in two pieces
    (and not contiguous), or in one.
    """
    server = latent_server(host, tokens)
    batch, rows = server.batch(), 2 * tokens
    if graph:
        server.backend.init_forward_metadata_out_graph(batch, in_capture=True)
        server.backend.init_forward_metadata_in_graph(batch)
    else:
        server.backend.init_forward_metadata(batch)
    for layer_id in range(3):
        layer = fakes.make_layer(layer_id=layer_id, scaling=0.3, **LAYER)
        generator = torch.Generator().manual_seed(layer_id)
        q = torch.randn(rows, HEADS, VALUE + ROPE, generator=generator)
        k = torch.randn(rows, 1, VALUE + ROPE, generator=generator)
        values = k[..., :VALUE]
        if in_two:
            nope = q[..., :VALUE].transpose(0, 1).contiguous().transpose(0, 1)
            rope = {"q_rope": q[..., VALUE:], "k_rope": k[..., VALUE:]}
            out = server.backend.forward(nope, values, values, layer, batch, **rope)
        else:
            out = server.backend.forward(q.flatten(1), k.flatten(1), values, layer, batch)
        assert torch.equal(server.pool.buffers[layer_id][batch.out_cache_loc], k)
        keys = server.pool.buffers[layer_id].unsqueeze(1)
        table, lens = torch.from_numpy(server.table[1:]), torch.from_numpy(server.lens)
        want = reference_attention(q, keys, keys, table, lens, sm_scale=0.3)[..., :VALUE]
        torch.testing.assert_close(out.view(want.shape).double(), want, rtol=1e-5, atol=1e-5)
    assert not {"extend", "decode"} & set(server.calls)
    if not graph:
        counters = server.state.counters()
        verified = rows if tokens > 1 else 0
        assert (counters.steps_tree, counters.verified_tokens) == (1, verified)
        assert counters.kv_bytes_read < 0.6 * counters.kv_bytes_query_guided


def test_chains_replay_the_graph_that_their_sharing_asks_for(host):
    """The host's graph is captured first, then one with tree attention; both find metadata."""
    verifying, sharing = latent_server(host, DRAFTED), SimpleNamespace(reason=None)
    sharing.too_little = lambda forward_batch: sharing.reason
    steps, calls = verifying.steps, verifying.calls
    steps.sharing = sharing
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
        assert verifying.state.counters().verified_tokens == verified
        assert verifying.state.counters().steps_host == {"little": left}
    assert calls == ["capture", "replay", "replay", "replay"]
    assert not steps.takes(verifying.batch("decode"))
    sharing.reason = "little"  # of a step without a graph
    verifying.backend.init_forward_metadata(verifying.batch())
    assert (calls[-1], steps.layers.step) == ("metadata", None)
    assert verifying.state.counters().steps_host == {"little": 2}


@pytest.fixture
def sharing():
    """Asks about batches: `requests` of a prefix of 200 tokens; the costs say `answer`."""
    prefix = list(range(1000, 1200))
    requests, table, lens = fakes.requests_of([[*prefix, 1], [*prefix, 2, 3]])
    for request, tokens in zip(requests, lens, strict=True):
        request.seqlen = int(tokens)
    asking = SimpleNamespace(requests=requests, lens=lens, asked=[], answer=False)

    def gains(forest, num_layers):
        asking.asked.append((forest, num_layers))
        return asking.answer

    attention = SimpleNamespace(query_tokens=DRAFTED, device=torch.device("cuda"), gains=gains)
    observer = BatchObserver("runner")
    decides = latent.LatentSharing(attention, observer, 27)

    def say(requests, cache=fakes.RADIX_CACHE):
        """The answer for a new batch; the host asks twice about each."""
        batch = fakes.make_batch("verify", table, [1, 2], lens, rids=list(requests))
        observer.observe(batch, SimpleNamespace(reqs=requests, tree_cache=cache), "runner")
        said = decides.too_little(batch)
        assert decides.too_little(batch) == said
        return said

    asking.attention, asking.say = attention, say
    asking.settle = lambda *given: [say(*given) for _ in range(18)][-1]  # two answers
    asking.unobserved = lambda: decides.too_little(SimpleNamespace(rids=["other"]))
    return asking


def test_the_costs_decide_once_when_the_requests_change(sharing):
    """By the forest that the tree shows, and exactly eight batches later: all ranks alike."""
    requests = sharing.requests
    said = [sharing.say(requests) for _ in range(20)]
    assert said == ["sharing not known yet"] * 8 + ["shares too little to be faster"] * 12
    ((forest, layers),) = sharing.asked
    assert layers == 27
    assert forest.tokens_attended - forest.tokens_stored == 200
    assert forest.seq_lens.tolist() == [n + DRAFTED for n in sharing.lens]
    sharing.answer = True
    said = [sharing.say(requests[::-1]) for _ in range(10)]
    assert said == ["shares too little to be faster"] * 8 + [None] * 2
    # Requests that change in every batch are asked about again as soon as there is an answer.
    for _ in range(20):
        requests = requests[::-1]
        assert sharing.say(requests) is None
    assert len(sharing.asked) <= 5
    assert sharing.settle(requests[:1]) == "shares nothing"
    assert sharing.unobserved() == "batch without requests"


def test_sharing_that_cannot_be_found_is_the_hosts(sharing, failures):
    requests, gains = sharing.requests, sharing.attention.gains
    sharing.attention.gains = raising(ValueError("planted"))
    assert sharing.settle(requests) == "planning failed"
    assert "planted" in failures.pop()
    assert sharing.settle([object(), requests[0]]) == "planning failed"
    assert "AttributeError" in failures.pop()
    assert sharing.settle(requests[::-1], object()) == "unreadable prefix cache"
    sharing.attention.gains, sharing.answer = gains, True  # EAGLE's caches hold bigrams
    of_bigrams = type("RadixCache", (), {**vars(type(fakes.RADIX_CACHE)), "is_eagle": True})()
    assert sharing.settle(requests, of_bigrams) is None


def test_layers_of_another_shape_are_the_hosts(host):
    """Such as the layer of the same id with the model's own heads, which serves prefill."""
    server = latent_server(host)
    batch = server.batch()
    server.backend.init_forward_metadata(batch)
    windowed = fakes.make_layer(layer_id=1, sliding_window_size=8, **LAYER)
    for layer in (fakes.make_layer(layer_id=2), windowed):
        server.forward(batch, layer, save_kv_cache=False)
    assert server.calls == ["metadata", "decode", "decode"]


def runner(**changes):
    """A model runner on the CPU with two latent layers, and a prefill layer of the first's id."""
    from sglang.srt.layers.radix_attention import RadixAttention

    class Layer(RadixAttention):
        def __init__(self, **attributes):
            torch.nn.Module.__init__(self)
            vars(self).update(vars(fakes.make_layer(**attributes)))

    layers = [Layer(layer_id=i, **{**LAYER, **changes.pop(f"layer{i}", {})}) for i in range(2)]
    # Only a layer with one head of keys that are wider than values is latent.
    others = {}, {**LAYER, "v_head_dim": VALUE + ROPE}, {**LAYER, "tp_k_head_num": 2}
    layers += [Layer(layer_id=at, **each) for at, each in zip((0, 2, 3), others, strict=True)]
    made = {"token_to_kv_pool": MLATokenToKVPool(), "model": torch.nn.ModuleList(layers)}
    return fakes.model_runner(**made, **changes)


@pytest.mark.parametrize("drafted", [None, 2])
def test_the_layers_of_a_server(host, drafted, monkeypatch):
    """They are refused unless asked for: no record shows them on the CPU."""
    monkeypatch.setattr(factory, "model_asks", lambda runner: "it asks")
    arguments = SimpleNamespace(speculative_algorithm=drafted and "EAGLE", port=81)
    arguments.speculative_num_draft_tokens, ranks = drafted, SimpleNamespace(tp_rank=0)
    rows = SimpleNamespace(size=9, req_to_token=torch.zeros((9, 4)))
    made = runner(req_to_token_pool=rows, server_args=arguments, ps=ranks)
    with pytest.raises(Unsupported, match=r"no record shows MLA models with .*; DEFT_MLA=1"):
        factory._create(made, None, Settings(), ExitStack())
    seen = []
    own = SimpleNamespace(token_to_kv_pool=made.token_to_kv_pool, req_to_token_pool=rows)
    monkeypatch.setattr(factory, "surround", lambda host, steps: (host, steps))
    monkeypatch.setattr(factory, "_steps", lambda runner, layers, *given: seen.append(layers))
    assert factory._create(made, own, Settings(mla=True, verify=True), ExitStack())[0] is own
    (layers,) = seen
    attention = layers.attention
    assert (attention.max_batch, attention.query_tokens) == (9, drafted or 1)
    assert (attention.shape.num_query_heads, attention.shape.latent_dim) == (HEADS, VALUE + ROPE)
    assert attention.page_size == 1
    assert layers.division == Division(
        dict.fromkeys((0, 1), LayerShape(HEADS, 1, VALUE + ROPE)), {}
    )
    assert (layers.model_asks, layers._verify, layers.state.values_apart) == (
        "it asks",
        True,
        False,
    )


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
    with pytest.raises(Unsupported, match=reason):
        latent.latent_attention(runner(**changes), 4, 1, Settings())


@pytest.mark.parametrize("causal", [False, True])
def test_what_the_hosts_kernel_is_asked(causal, monkeypatch):
    def kernel(**given):
        names = ("q", "qv", "k_cache", "v_cache", "page_table", "cache_batch_idx", "cu_seqlens_q")
        names += ("cache_leftpad", "cache_seqlens", "softmax_scale", "causal")
        out, lse = attend(*(given.pop(name) for name in names))
        assert given == {"max_seqlen_q": 3, "num_splits": 7, "return_softmax_lse": True}
        return out, lse, "accumulators"

    for name in ("sgl_kernel", "sgl_kernel.flash_attn"):
        monkeypatch.setitem(sys.modules, name, SimpleNamespace(flash_attn_with_kvcache=kernel))
    check_answers(latent.sglang_latent_attention, causal)
