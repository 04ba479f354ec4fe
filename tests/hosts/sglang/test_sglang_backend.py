"""The attention backend around a stand-in for the host's own: eager steps, captures, replays."""

from ast import literal_eval
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sglang_fakes as fakes
from attention_checks import tree_attention
from deft_backend.hosts.common.limits import LayerShape
from deft_backend.hosts.sglang.backend import surround
from deft_backend.hosts.sglang.layers import unsupported_layer
from deft_backend.hosts.sglang.step_inputs import Verification
from deft_backend.hosts.sglang.versions import read_end
from deft_backend.telemetry.counters import Content, Steps
from deft_backend.telemetry.shown_batch import forest_of
from drawings import check_asked
from failure_lines import raising

PREFIX = list(range(10, 510))
SHARED = [[*PREFIX, 4, 5], [*PREFIX, 9]]


@pytest.fixture
def server(host):
    """Its batches share a prefix; the host's graphs hold static tensors."""
    _, table, lens = fakes.requests_of(SHARED)

    def batch(kind="decode", size=2):
        rows, lengths = [1, 2, 0, 0, 0, 0][:size], [*lens.tolist(), 1, 1, 1, 1][:size]
        return fakes.make_batch(kind, table, rows, lengths)

    own = fakes.recording_backend(host, fakes.MHATokenToKVPool(520), table)()
    return fakes.FakeServer(own, tree_attention(max_batch=4), batch)


def written(server, batch, layer_id=0):
    """Whether the step's keys are in the cache."""
    keys = server.pool.get_key_buffer(layer_id)[batch.out_cache_loc]
    return torch.equal(keys.flatten(), fakes.query(len(keys))[1].flatten())


def test_an_eager_step_is_planned_from_the_page_table(server):
    batch = server.batch()
    server.close(server.step(batch), batch)
    assert server.calls == []
    shown = forest_of(server.state.batch)
    assert (shown.batch_size, shown.tokens_stored) == (2, len(PREFIX) + 5)
    assert written(server, batch)
    # The thread that shows batches must not read a sleeping server's memory.
    server.state.batch, server.steps.shows = None, False
    server.backend.init_forward_metadata(server.batch())
    assert server.state.batch is None


def test_what_is_captured_plans_whatever_it_is_replayed_for(server):
    """Capture with a dummy batch padded to four; replay over other rows and lengths."""
    static, real = server.batch(size=4), server.batch(size=4)
    static.seq_lens.fill_(1)
    static.req_pool_indices.fill_(0)
    server.capture(static)
    assert server.state.batch is None  # the captured batch is not one of the server's

    static.seq_lens.copy_(real.seq_lens)
    static.req_pool_indices.copy_(real.req_pool_indices)
    server.replay(SimpleNamespace(**{**vars(real), "seq_lens": static.seq_lens}))
    assert server.calls == ["capture", "in graph"], "the replay needs no metadata of the host"
    assert server.steps.reads_during_forward(real.forward_mode)
    assert forest_of(server.state.batch).tokens_stored == len(PREFIX) + 5
    server.close(server.launch(static), real)


def test_small_large_and_other_batches_are_the_hosts(server):
    for size in (1, 5):
        server.step(server.batch(size=size))
        for in_capture in (True, False):
            batch = server.batch(size=size)
            server.backend.init_forward_metadata_out_graph(batch, in_capture=in_capture)
        assert not server.steps.reads_during_forward(fakes.mode("decode"))
    server.step(server.batch("extend"))
    assert server.calls == ["metadata", "decode", "capture", "replay"] * 2 + ["metadata", "extend"]
    assert server.state.counters().steps_host == {
        "batch smaller than DEFT_MIN_BATCH=2": 2,
        "batch larger than the 4 requests that a plan holds": 2,
    }
    assert server.state.counters().steps_tree == 0


def test_a_graph_that_was_captured_with_a_hosts_layer_gets_its_metadata(server, caplog):
    server.capture(server.batch(), fakes.make_layer(sliding_window_size=8, layer_id=1))
    assert server.calls == ["capture", "in graph", "decode"]
    assert server.state.device_tree_layers == server.state.num_layers - 1
    assert "layers with a sliding window decode through the host's" in caplog.text
    server.replay(server.batch())
    assert server.calls[-1] == "replay"
    assert server.steps.reads_during_forward(fakes.mode("decode"))


@pytest.mark.parametrize(
    ("broken", "reason"), [("plan_batch", "planning failed"), ("run", "kernel failed")]
)
def test_a_failure_leaves_the_capture_to_the_host(server, monkeypatch, failures, broken, reason):
    """The graph may hold what was launched before the failure: it reads page tables."""
    monkeypatch.setattr(server.attention, broken, raising(RuntimeError("out of resources")))
    batch = server.batch()
    server.capture(batch, fakes.make_layer(), fakes.make_layer(layer_id=1))
    assert written(server, batch, 0)
    assert written(server, batch, 1)
    server.replay(server.batch())
    assert server.steps.reads_during_forward(fakes.mode("decode"))
    server.backend.init_forward_metadata(server.batch())
    assert server.calls == ["capture", "in graph", "decode", "decode", "replay", "metadata"]
    (line,) = failures
    failures.clear()
    assert (
        "failed (RuntimeError('out of resources')). The host's kernel decodes from now on" in line
    )
    assert server.state.counters().steps_host == {reason: 2}


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("scales", [(0.5, 0.25), (None, None)])
def test_keys_and_values_of_8_bits(host, tokens, fails, scales, monkeypatch, failures):
    """The host's pool divides its arguments in place, once, and tree attention multiplies. After a
    failed kernel the host writes nothing, but its `triton` also reads the arguments of drafts.
    """
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    shape = {"size": 64, "page_size": 1, "head_num": 2, "head_dim": 64, "layer_num": 1}
    kind = {"dtype": torch.float8_e4m3fn, "device": "cpu", "enable_memory_saver": False}
    pool = MHATokenToKVPool(**shape, **kind)
    for cache in (*pool.k_buffer, *pool.v_buffer):
        drawn = torch.randn(cache.shape, generator=torch.Generator().manual_seed(2))
        cache.copy_(drawn.to(torch.float8_e4m3fn).view(cache.dtype))
    table = torch.arange(64, dtype=torch.int32).view(2, 32).numpy().copy()
    seen = []

    class Host(fakes.recording_backend(host, pool, table)):
        def write(self, k, v, layer, batch, save_kv_cache):
            assert not save_kv_cache
            seen.extend((k, v))

    kinds = {"dtype": torch.bfloat16, "kv_dtype": torch.float8_e4m3fn}
    attention = tree_attention(**kinds, max_batch=4, query_tokens=tokens)
    drafts = tokens > 1
    verification = Verification(tokens, 4, attention.device) if drafts else None
    backend = fakes.FakeServer(Host(), attention, verification=verification).backend
    spec = SimpleNamespace(topk=1, draft_token_num=tokens)
    kind = "verify" if drafts else "decode"
    batch = fakes.make_batch(kind, table, [0, 1], [5, 6], tokens, spec_info=spec)
    slots = batch.out_cache_loc
    backend.init_forward_metadata(batch)
    if fails:
        monkeypatch.setattr(attention, "run", raising(RuntimeError("a launch failed")))
    k, v = (torch.full((2 * tokens, 2, 64), value, dtype=torch.bfloat16) for value in (1.0, 2.0))
    k_scale, v_scale = (None if scale is None else torch.tensor(scale) for scale in scales)
    q = torch.randn(2 * tokens, 256).bfloat16()
    out = backend.forward(q, k, v, fakes.make_layer(k_scale=k_scale, v_scale=v_scale), batch)
    k_scale, v_scale = (scale or 1.0 for scale in scales)
    keys, values = pool.get_key_buffer(0), pool.get_value_buffer(0)
    assert (keys[slots].float() * k_scale == 1.0).all()
    assert (values[slots].float() * v_scale == 2.0).all()
    if fails:
        assert "a launch failed" in failures.pop()
        for part, value, scale in zip(seen, (1.0, 2.0), (k_scale, v_scale), strict=True):
            assert (part * (1.0 if drafts else scale) == value).all()
        assert torch.equal(out, q if drafts else torch.zeros_like(q))
        return
    caches = SimpleNamespace(k=keys.double() * k_scale, v=values.double() * v_scale)
    rows, held = [0] * tokens + [1] * tokens, [*range(6 - tokens, 6), *range(7 - tokens, 7)]
    expected = fakes.decode_attention(caches, table, rows, held, q.double())
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)


def test_graphs_captured_anew_hold_what_is_captured_then(server, monkeypatch, failures):
    """A kernel fails: captured graphs stay in use. A later capture, as after new weights, is the
    host's."""
    server.capture(server.batch())
    server.replay(server.batch())
    assert server.calls == ["capture", "in graph"]  # tree attention needs no metadata
    with monkeypatch.context() as broken:
        broken.setattr(server.attention, "run", raising(RuntimeError("out of resources")))
        server.step(server.batch())
    assert "CUDA graphs that hold tree attention stay in use" in failures.pop()
    steps = server.state.counters().steps_host
    server.replay(server.batch())
    assert server.state.counters().steps_host == steps  # the graph's own planner counts
    server.calls.clear()
    server.capture(server.batch())
    server.replay(server.batch())
    assert server.calls == ["capture", "in graph", "decode", "replay"]
    # An earlier graph of the size may still exist.
    assert server.steps.reads_during_forward(fakes.mode("decode"))
    assert server.state.counters().steps_host == {
        "kernel failed": 2
    }  # the eager step and the replay


def test_plans_are_counted_but_not_those_of_captures(server, monkeypatch):
    def capture():
        server.backend.init_forward_metadata_out_graph(warm, in_capture=True)
        server.backend.init_forward_metadata_in_graph(warm)

    warm = server.batch()
    capture()
    for _ in range(3):
        server.backend.init_forward_metadata(server.batch())
    counters = server.state.counters()
    assert counters.plans == 3
    tokens = counters.kv_bytes_query_guided // (2 * server.state.token_bytes)
    assert tokens == 3 * int(warm.seq_lens.sum())
    assert counters.kv_bytes_read < 0.6 * counters.kv_bytes_query_guided
    for _ in range(2):  # the server has new weights and captures again
        capture()
    assert server.state.counters() == counters
    server.backend.init_forward_metadata(server.batch())
    assert server.state.counters().plans == 4
    assert server.state.counters().kv_bytes_read * 3 == counters.kv_bytes_read * 4
    waits = []  # on a GPU, the first of several captures waits for the step before
    monkeypatch.setattr(server.attention, "device", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "synchronize", waits.append)
    for _ in range(2):
        server.steps._hold_counters(True)
    assert waits == [torch.device("cuda")]


def test_page_tables_are_read_until_the_end_once_a_graph_holds_tree_attention(server):
    """The host asks before it names the graph that it replays."""
    backend, decode = server.backend, fakes.mode("decode")
    type(server.own).shared_read_ends = lambda self, mode: "the host's"
    assert backend.shared_read_ends(decode) == "the host's"
    backend.init_forward_metadata_out_graph(server.batch(), in_capture=True)
    assert backend.shared_read_ends(decode) == read_end()
    assert backend.shared_read_ends(fakes.mode("extend")) == "the host's"
    # The host captures the size again, for itself: its earlier graph may still run.
    server.layers.failure.reason = "planning failed"
    backend.init_forward_metadata_out_graph(server.batch(), in_capture=True)
    assert backend.shared_read_ends(decode) == read_end()


def test_full_and_windowed_layers_share_a_graph(server, host, caplog):
    """The host's metadata is part of each replay; the full layer writes to the full pool alone."""
    pool = fakes.SWAKVPool(full=[1], windowed=[0, 2], slots=520)
    left = dict.fromkeys((0, 2), "a sliding window")
    own = fakes.recording_backend(host, pool, server.table)()
    layers = partial(fakes.tree_layers, host_layers=left)
    server = fakes.FakeServer(own, server.attention, server.batch, layers)
    server.pool = SimpleNamespace(**dict(zip("kv", pool.full_kv_pool.buffers[1], strict=True)))
    first, full, last = (
        fakes.make_layer(layer_id=at, sliding_window_size=8 if at in left else -1)
        for at in range(3)
    )
    eager = server.batch()
    server.backend.init_forward_metadata(eager)
    server.forward(eager, first)
    server.close(server.forward(eager, full), eager)
    server.forward(eager, last)
    assert server.calls == ["metadata", "decode", "decode"]
    for layer_id in range(3):
        keys = pool.get_key_buffer(layer_id)[eager.out_cache_loc]
        assert torch.equal(keys.flatten(), fakes.query()[1].flatten())

    server.calls.clear()
    static = server.batch()
    server.close(server.capture(static, first, last, full), static)
    server.replay(server.batch())
    assert server.calls == ["capture", "in graph", "decode", "decode", "replay"]
    # The log has named these layers at the start; the counters leave them out.
    assert "a sliding window" not in caplog.text
    assert server.state.device_tree_layers is None


def test_why_the_host_runs_a_layer():
    """Of a layer that other layers have the shape of, and as one of MLA."""

    def answer(*words):
        layer = fakes.make_layer()
        for name, _, value in (word.partition("=") for word in words):
            if name == "without":  # as in versions without this kind of attention
                delattr(layer, value)
            elif name == "attn_type":
                layer.attn_type = SimpleNamespace(value=value)
            else:
                setattr(layer, name, literal_eval(value))
        yield str(unsupported_layer(layer, LayerShape(4, 2, 64)))
        yield f"MLA: {unsupported_layer(layer, latent=True)}"

    check_asked(Path(__file__).with_name("layers.txt"), answer)
    assert (
        unsupported_layer(fakes.make_layer(tp_q_head_num=8)) is None
    )  # the first layer has any shape


@pytest.mark.parametrize(
    ("changes", "requests", "tokens"),
    [
        ({}, 2, 1005),
        ({"seq_lens_sum": None, "seq_lens_cpu": torch.tensor([5, 6])}, 2, 11),
        ({"seq_lens_sum": None}, 2, 0),
        ({"num_padding": 1}, 1, 1005),
    ],
)
def test_the_rows_and_the_context_of_a_step_are_counted(server, changes, requests, tokens):
    """A replay counts without its padding; the context may be unknown to the CPU."""
    batch = server.batch()
    vars(batch).update(changes)
    server.replay(batch)
    held = server.state.token_bytes * server.state.num_layers
    steps = {Content("decode", "no graph"): Steps(1, requests, tokens * held)}
    assert server.state.counters().steps == steps


def test_a_layers_sinks_scale_and_soft_cap_are_used(server):
    batch, sinks = server.batch(), torch.tensor([2.0, -1.0, 5.0, 0.5])
    server.backend.init_forward_metadata(batch)
    server.close(server.forward(batch, sinks=sinks), batch, sinks=sinks)
    server.close(server.forward(batch, q_rope=None), batch)  # the same layer without sinks
    out = server.forward(batch, fakes.make_layer(scaling=0.7))
    server.close(out, batch, scale=0.7)
    capped = server.forward(batch, fakes.make_layer(scaling=0.7, logit_cap=0.5))
    assert (capped - out).abs().max() > 0.01
    assert server.calls == []


@pytest.mark.parametrize("change", [{"q_rope": torch.zeros(4)}, {"k": None}])
def test_arguments_that_are_not_known_are_handed_on(server, change):
    batch = server.batch()
    server.step(batch)
    assert server.calls == []
    server.forward(batch, **change)
    assert server.calls == ["metadata", "decode"]
    server.forward(
        batch, fakes.make_layer(layer_id=1), **change
    )  # also if a layer's first call has them
    assert server.calls == ["metadata", "decode", "decode"]
    assert server.layers.tree_layers == server.state.num_layers - 1


@pytest.mark.parametrize("wrong", [0.0, 0.5, float("nan")])
def test_verification_compares_each_layer_with_the_hosts(server, failures, wrong):
    """``DEFT_VERIFY``: after a difference the host's result is the output, and of later steps."""

    def forward_decode(self, q, k, v, layer, batch, save_kv_cache=True):
        assert not save_kv_cache  # tree attention has written them
        server.calls.append("decode")
        rows, lens = batch.req_pool_indices.tolist(), batch.seq_lens.tolist()
        return fakes.decode_attention(server.pool, server.table, rows, lens, q).float() + wrong

    type(server.own).forward_decode = forward_decode
    server.surround(partial(fakes.tree_layers, verify=True))
    batch = server.batch()
    out = server.step(batch)
    if not wrong:
        server.close(out, batch)
        assert (server.state.counters().steps_tree, server.calls) == (1, ["metadata", "decode"])
        server.calls.clear()
        server.capture(server.batch())  # the CPU can read nothing back in a capture
        assert server.calls == ["capture", "in graph"]
        return
    assert (
        torch.equal(out, forward_decode(server.own, fakes.query()[0], 0, 0, 0, batch, False))
        or wrong != 0.5
    )
    assert "the results of tree attention and of the host's kernel differ by" in failures.pop()
    counters = server.state.counters()
    assert (counters.steps_tree, counters.steps_host) == (0, {"kernel failed": 1})
    server.calls.clear()
    server.backend.init_forward_metadata(server.batch())
    assert server.calls == ["metadata"]


def test_models_that_call_their_backend_find_its_metadata(server):
    """Their calls may read the host's metadata, so tree steps also make it, exactly once."""
    server.surround(partial(fakes.tree_layers, model_asks=True))
    batch = server.batch()
    assert server.step(batch).any()
    assert server.calls == ["metadata"]  # whatever layers follow
    server.forward(batch, fakes.make_layer(sliding_window_size=8, layer_id=1))
    assert server.calls == ["metadata", "decode"]
    server.capture(server.batch())
    server.calls.clear()
    server.replay(server.batch())
    assert server.calls == ["replay"]


def test_a_model_that_asks_meets_the_hosts_backend(server):
    """By the context of a forward; it has the class and the attributes of the host's."""
    from sglang.srt.model_executor.forward_context import (
        ForwardContext,
        forward_context,
        get_attn_backend,
    )

    with forward_context(ForwardContext(attn_backend=server.backend)):
        backend = get_attn_backend()
    assert isinstance(backend, type(server.own))
    backend.tail_layer = 7
    assert server.own.tail_layer == 7
    server.own.needs_cpu_seq_lens = False
    assert not backend.needs_cpu_seq_lens


def test_a_backend_that_keeps_methods_in_its_instances_is_refused(server):
    """Shared attributes would hide ours: the host's kernel would run where we planned."""
    server.own.forward_decode = None
    with pytest.raises(RuntimeError, match="HostBackend sets forward_decode on its instances"):
        surround(server.own, server.steps)


def test_what_the_host_calls_of_itself_is_not_replaced(server):
    """The base class prepares an eager step by the two hooks of graphs."""
    del type(server.own).init_forward_metadata
    server.backend.init_forward_metadata(server.batch(size=1))
    assert server.calls == ["replay", "in graph"]
    assert sum(server.state.counters().steps_host.values()) == 1
