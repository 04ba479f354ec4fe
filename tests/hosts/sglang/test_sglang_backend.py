"""The attention backend around a stand-in for the host's own backend: who decodes which step."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from deft_backend.hosts.sglang.start.layers import unsupported_layer
from deft_backend.hosts.sglang.step.decode_plan import BatchObserver
from deft_backend.planner.encoding import ITEM_ORDER
from failure_lines import raising
from sglang_fakes import (
    FakePool,
    MHATokenToKVPool,
    Tree,
    host_planned,
    make_layer,
    make_state,
    mode,
    query,
    recording_backend,
    requests_of,
    small_attention,
    tree_layers,
)


def test_the_observer_knows_its_batch_by_the_list_of_ids():
    runner, rids = object(), ["a", "b"]
    observer = BatchObserver(runner)

    def observe(kind, rids, runner):
        batch = SimpleNamespace(reqs=["ra", "rb"], tree_cache="tree")
        made = SimpleNamespace(forward_mode=mode(kind), rids=rids, req_pool_indices="rows")
        observer.observe(made, batch, runner)

    def seen(rids):
        return observer.of(SimpleNamespace(rids=rids))

    observe("decode", rids, runner)
    observe("decode", ["c"], object())  # another runner's batch
    assert (seen(rids).requests, seen(rids).tree_cache) == (["ra", "rb"], "tree")
    assert seen(rids).table_rows == "rows"
    assert seen(["a", "b"]) is None  # equal, not the same
    assert seen(None) is None
    observe("extend", ["d"], runner)
    assert seen(rids) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"logit_cap": 30.0}, None),
        ({"logit_cap": 30.0, "logit_capping_method": "sigmoid"}, "sigmoid capping"),
        ({"is_cross_attention": True}, "cross attention"),
        ({"attn_type": SimpleNamespace(value="encoder_only")}, "encoder_only attention"),
        ({"sliding_window_size": 0}, "a sliding window"),
        ({"use_irope": True}, "chunked local attention"),
        ({"pos_encoding_mode": "ALIBI"}, "position encoding ALIBI"),
        ({"xai_temperature_len": 4}, "a temperature"),
        ({"v_head_dim": 128}, "keys of 64 and values of 128"),
        ({"tp_v_head_num": 1}, "2 key heads and 1 value heads"),
        ({"tp_q_head_num": 8}, "8 query and 2 KV heads of 64"),
        ({"qk_head_dim": 128, "v_head_dim": 128}, "4 query and 2 KV heads of 128"),
    ],
)
def test_layers(changes, reason):
    found = unsupported_layer(make_layer(**changes), (4, 2, 64))
    assert found is None if reason is None else reason in str(found)


KEYS = query()[1]  # of every step


def layer_of(layer_id):
    return make_layer(layer_id=layer_id)


@pytest.fixture
def server(host):
    """A backend over a fake host backend that records its calls, with two requests that share."""
    requests, table, lens = requests_of([[1, 2, 3, 4, 5], [1, 2, 3, 9]], Tree())
    calls = []

    class HostBackend(recording_backend(host, FakePool(), table, calls)):
        needs_cpu_seq_lens = False
        extra = "of the host"

        def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
            calls.append("new buffers" if in_capture else "metadata out of graph")

        def support_triton(self):
            return False

    layers = tree_layers(
        HostBackend(), small_attention(max_batch=4, policy="deft-node"), make_state()
    )
    made = host_planned(layers, table, requests, lens)
    made.calls = calls
    return made


def view_of(batch, **changes):
    """What the host passes for the replay of a graph."""
    view = {"forward_mode": batch.forward_mode, "out_cache_loc": batch.out_cache_loc}
    return SimpleNamespace(**{**view, **changes})


def test_a_shared_decode_batch_goes_through_the_tree(server):
    batch = server.batch()
    out = server.step(batch)
    assert server.calls == []
    server.close(out, batch)
    assert server.pool.k[batch.out_cache_loc].flatten().tolist() == KEYS.flatten().tolist()
    assert (server.state.counters().steps_tree, server.state.plans) == (1, 1)
    assert server.state.counters().kv_bytes_read < server.state.counters().kv_bytes_query_guided


def test_a_layers_sinks_scale_and_soft_cap_are_used(server):
    batch, sinks = server.batch(), torch.tensor([2.0, -1.0, 5.0, 0.5])
    server.backend.init_forward_metadata(batch)
    server.close(server.forward(batch, sinks=sinks), batch, sinks=sinks)
    server.close(server.forward(batch), batch)  # the same layer without sinks
    out = server.forward(batch, make_layer(scaling=0.7))
    server.close(out, batch, scale=0.7)
    capped = server.forward(batch, make_layer(scaling=0.7, logit_cap=0.5))
    assert (capped - out).abs().max() > 0.01
    assert server.calls == []


def test_layers_that_are_left_to_the_host_get_its_metadata_once(server, caplog):
    batch = server.batch()
    server.backend.init_forward_metadata(batch)
    for layer_id in (1, 2):
        server.forward(batch, make_layer(sliding_window_size=8, layer_id=layer_id))
        written = server.pool.get_key_buffer(layer_id)[batch.out_cache_loc]
        assert torch.equal(written.flatten(), KEYS.flatten())
    assert server.state.counters().steps_tree == 0  # no layer has run through tree attention yet
    server.forward(batch)
    assert server.calls == ["metadata", "decode", "decode"]
    assert caplog.text.count("layers with a sliding window decode through the host's") == 1
    assert server.state.counters().steps_tree == 1


@pytest.mark.parametrize("change", [{"q_rope": torch.zeros(4)}, {"k": None}])
def test_arguments_that_are_not_known_are_handed_on(server, change):
    batch = server.batch()
    server.step(batch)
    assert server.calls == []
    server.forward(batch, **change)
    assert server.calls == ["metadata", "decode"]


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("extend", None), ("unknown", "batch without requests"), ("padded", "padded batch"),
        ("padded lengths", "padded batch"), ("no lengths", None), ("beams", "beam search"),
    ],
)  # fmt: skip
def test_other_batches_are_handed_on(server, kind, reason):
    decodes = kind != "extend"
    batch = server.batch("decode" if decodes else "extend", known=kind != "unknown")
    if kind in ("padded", "beams"):
        batch.batch_size = 4
    if kind == "beams":  # they have rows of the batch, and only their leader has a request
        server.requests[0].beam_group = object()
    if kind == "padded lengths":
        batch.seq_lens_cpu = torch.cat((batch.seq_lens_cpu, torch.ones(2, dtype=torch.int64)))
    if kind == "no lengths":
        batch.seq_lens_cpu = None
    server.step(batch)
    assert server.calls == ["metadata", "decode" if decodes else "extend"]
    assert server.state.counters().steps_tree == 0
    assert server.state.steps_host == ({} if reason is None else {reason: 1})


def test_a_batch_is_decided_and_counted_once(server):
    """The host asks before it chooses its graph; a following eager step uses the same answer."""
    for steps in (1, 2):
        each = server.batch()
        assert server.steps.takes(each)
        assert server.steps.takes(each)
        server.backend.init_forward_metadata(each)
        assert server.state.counters().steps_tree == steps - 1  # no layer has run yet
        for layer_id in range(2):
            server.forward(each, make_layer(layer_id=layer_id))
        assert server.state.counters().steps_tree == steps
    other = server.batch(known=False)
    assert not server.steps.takes(other)
    server.backend.init_forward_metadata(other)
    assert server.state.counters().steps_tree == 2
    assert sum(server.state.steps_host.values()) == 1


def test_graphs_launch_every_kernel_over_whatever_plan_is_there(server):
    """Capture under an empty plan, with a batch of another size; then replay by hand."""
    shared = server.batch()
    assert server.steps.takes(shared)  # the step is decided and planned before the host captures
    server.steps.capture_tree(True)
    assert not server.capture(server.batch(known=False)).any()
    server.steps.capture_tree(False)
    # The step's plan is restored: the graph's launches now compute its attention.
    server.replay(view_of(shared))
    # Neither the second capture nor the replay needs new buffers or metadata of the host.
    assert server.calls == ["metadata out of graph", "in graph"]
    assert server.state.counters().steps_tree == 1
    out = server.attention.run(
        query()[0].view(2, 4, 64), *(server.pool.k, server.pool.v), torch.from_numpy(server.table),
        shared.seq_lens, table_rows=shared.req_pool_indices, sm_scale=0.125, static_launch=True,
    )  # fmt: skip
    server.close(out.view(2, -1), shared)
    # A replay of another batch, or of a prefill, does not belong to the decision.
    server.calls.clear()
    for change in ({"out_cache_loc": torch.zeros(2)}, {"forward_mode": mode("extend")}):
        server.replay(view_of(shared, **change))
    assert server.calls == ["metadata out of graph"] * 2
    assert server.state.counters().steps_tree == 1


def test_the_second_capture_of_a_size_leaves_the_hosts_buffers_to_its_own_graph(
    server, monkeypatch
):
    """A host's backend may make new buffers for each capture, and fill only the newest."""
    from deft_patches.sglang import tree_graphs

    def capture(runner, size, forward, stream, label):
        server.calls.append(f"graph {label}")
        batch = server.batch(known=False)
        server.backend.init_forward_metadata_out_graph(batch, in_capture=True)

    model = SimpleNamespace()
    monkeypatch.setattr(tree_graphs, "_controllers", {id(model): server.steps})
    tree_graphs._capture_one_shape(capture, SimpleNamespace(model_runner=model), 2, None)
    assert server.calls == ["graph None", "new buffers", "graph deft", "metadata out of graph"]


def test_the_host_is_told_until_when_page_tables_are_read(server, host):
    """Tree attention answers "until the end"; otherwise the host's own backend answers. The host
    asks after it has chosen the graph. Without a decision the answer is the safe one."""
    from deft_backend.hosts.sglang.versions import read_end

    backend, decode, extend = server.backend, mode("decode"), mode("extend")
    type(server.own).shared_read_ends = lambda self, mode: ("the host's", mode)
    assert backend.shared_read_ends(decode) == read_end()
    assert backend.shared_read_ends(extend) == ("the host's", extend)
    assert server.steps.takes(server.batch())
    assert backend.shared_read_ends(decode) == read_end()
    assert not server.steps.takes(server.batch(known=False))
    assert backend.shared_read_ends(decode) == ("the host's", decode)
    ends = getattr(host, "SharedReadEnds", None)
    assert read_end() == (None if ends is None else ends.UNKNOWN)


def test_a_batch_that_is_padded_after_it_was_decided_on_is_the_hosts(server):
    """Ranks of data-parallel attention agree on a size between graph and eager step."""
    batch = server.batch()
    assert server.steps.takes(batch)
    batch.batch_size = 4
    server.step(batch)
    assert server.calls == ["metadata", "decode"]
    assert (server.state.counters().steps_tree, server.state.steps_host) == (0, {"padded batch": 1})
    server.step(server.batch())
    assert server.calls == ["metadata", "decode"]  # tree attention continues with the next batch


def test_a_graph_with_a_layer_of_the_host_gets_the_hosts_metadata(server):
    """Also if tree attention cannot run one call of a layer, but the layer in general."""
    shared, captured = server.batch(), server.batch(known=False)
    assert server.steps.takes(shared)
    server.steps.capture_tree(True)
    server.capture(captured)
    server.forward(captured, q_rope=torch.zeros(4))
    server.steps.capture_tree(False)
    server.replay(view_of(shared))
    assert server.calls == ["metadata out of graph", "in graph", "decode", "metadata out of graph"]


def test_planning_that_fails_costs_a_line(server, failures, monkeypatch):
    monkeypatch.setattr(server.attention, "plan", raising(ValueError("no room")))
    batch = server.batch()
    for _ in range(2):
        server.step(batch)
    assert server.calls == ["metadata", "decode"] * 2
    assert failures == [
        "deft: planning failed (ValueError('no room')). The host's kernel decodes such batches."
    ]
    failures.clear()
    assert server.state.steps_host == {"planning failed": 2}


def test_a_kernel_that_fails_is_not_tried_again(server, failures, monkeypatch):
    monkeypatch.setattr(server.attention, "run", raising(RuntimeError("out of resources")))
    batch = server.batch()
    server.step(batch, *map(layer_of, range(2)))
    for layer_id in range(2):
        written = server.pool.get_key_buffer(layer_id)[batch.out_cache_loc]
        assert torch.equal(written.flatten(), KEYS.flatten())
    server.backend.init_forward_metadata(server.batch())
    assert server.calls == ["metadata", "decode", "decode", "metadata"]
    assert "a kernel failed (RuntimeError('out of resources'))" in failures.pop()
    assert (server.state.counters().steps_tree, server.state.steps_host) == (
        0,
        {"kernel failed": 2},
    )


def test_a_failure_of_one_rank_leaves_the_choice_of_graphs(server, failures, monkeypatch):
    """All ranks must replay the same set: graphs hold collectives."""
    with monkeypatch.context() as patch:
        patch.setattr(server.attention, "run", raising(RuntimeError("out of memory")))
        server.step(server.batch())
    assert "a kernel failed" in failures.pop()
    batch = server.batch()
    assert server.steps.takes(batch)
    server.replay(view_of(batch))
    assert server.calls == ["metadata", "decode"]  # no layer of the graph reads the host's metadata
    assert (server.state.counters().steps_tree, server.state.steps_host) == (
        1,
        {"kernel failed": 1},
    )


def test_a_failure_within_a_capture_leaves_the_graph_the_hosts_metadata(
    server, failures, monkeypatch
):
    shared, captured = server.batch(), server.batch(known=False)
    assert server.steps.takes(shared)
    server.steps.capture_tree(True)
    server.backend.init_forward_metadata_out_graph(captured, in_capture=True)
    server.steps.layers.give_up(server.steps.layers.step, RuntimeError("planted"))
    server.forward(captured)
    server.steps.capture_tree(False)
    assert "planted" in failures.pop()
    server.calls.clear()
    server.replay(view_of(shared))
    assert server.calls == ["metadata out of graph"]


def test_a_step_counts_once_if_a_later_layer_fails(server, failures, monkeypatch):
    batch = server.batch()
    server.step(batch)
    monkeypatch.setattr(server.attention, "run", None)
    server.forward(batch, layer_of(1))
    assert server.calls == ["metadata", "decode"]
    assert (server.state.counters().steps_tree, server.state.steps_host) == (1, {})
    assert "a kernel failed" in failures.pop()


def test_models_that_call_their_backend_find_its_metadata(server):
    """Their calls may read the host's metadata, so tree steps also make it, exactly once."""
    layers = tree_layers(server.own, server.attention, server.state, model_asks=True)
    del server.own.deft
    asking = host_planned(layers, server.table, server.requests, server.lens)
    batch = asking.batch()
    assert asking.step(batch).any()
    asking.forward(batch, make_layer(sliding_window_size=8, layer_id=1))
    assert server.calls == ["metadata", "decode"]
    again = asking.batch()
    assert asking.steps.takes(again)
    asking.replay(view_of(again))
    assert server.calls[2:] == ["metadata out of graph"]


def test_a_model_that_asks_meets_the_hosts_backend(server, host):
    """Its class, its attributes in both directions, its methods, and those of its base class."""
    from sglang.srt.model_executor.forward_context import (
        ForwardContext,
        forward_context,
        get_attn_backend,
    )

    own, kind = server.own, type(server.own)
    kind.metadata_of_models = lambda self, batch: (self.tail_layer, self.forward_metadata, batch)
    own.forward_metadata = "made by the host"
    with forward_context(ForwardContext(attn_backend=server.backend)):
        backend = get_attn_backend()
    assert isinstance(backend, kind)
    assert isinstance(backend, host.AttentionBackend)
    backend.tail_layer = 7
    assert backend.metadata_of_models("batch") == (7, "made by the host", "batch")
    assert own.tail_layer == 7
    own.tail_layer = 8
    assert backend.tail_layer == 8
    del backend.tail_layer
    assert not hasattr(own, "tail_layer")
    assert (backend.extra, backend.support_triton()) == ("of the host", False)
    with pytest.raises(AttributeError, match="no_such_member"):
        _ = backend.no_such_member
    with pytest.raises(NotImplementedError):  # the host's base class defines it
        backend.init_cuda_graph_state(1, 1)
    assert backend.needs_cpu_seq_lens is True  # our own value: the forest needs them
    server.steps.needs_cpu_seq_lens = False
    assert backend.needs_cpu_seq_lens is False
    own.needs_cpu_seq_lens = True
    assert backend.needs_cpu_seq_lens is True  # the host's


def test_a_backend_that_keeps_methods_in_its_instances_is_refused(server):
    """Shared attributes would hide ours: the host's kernel would run where we planned."""
    from deft_backend.hosts.sglang.step.backend import surround

    server.own.forward_decode = None
    with pytest.raises(RuntimeError, match="HostBackend sets forward_decode on its instances"):
        surround(server.own, server.steps)


def test_what_the_host_calls_of_itself_is_not_replaced(server):
    """The base class prepares an eager step by the two hooks of graphs."""
    del type(server.own).__mro__[1].init_forward_metadata
    server.backend.init_forward_metadata(server.batch(known=False))
    assert server.calls == ["metadata out of graph", "in graph"]
    assert sum(server.state.steps_host.values()) == 1


def make_runner(columns):
    """A model runner, as far as the warm-up reads it."""
    table = torch.zeros((9, columns), dtype=torch.int32)
    return SimpleNamespace(
        token_to_kv_pool=MHATokenToKVPool(), model=torch.nn.Module(),
        req_to_token_pool=SimpleNamespace(req_to_token=table),
        server_args=SimpleNamespace(speculative_algorithm=None),
    )  # fmt: skip


@pytest.mark.usefixtures("host")
@pytest.mark.parametrize(
    ("max_batch", "policy", "reached"),
    [(1, "auto", {0}), (20, "auto", {0, 1}), (40, "deft-flatten", {0, 1, 2})],
)
def test_warm_up_launches_every_set_of_tiles(monkeypatch, max_batch, policy, reached):
    """Launch combinations are compiled in, so the warm-up must run all of them."""
    from deft_backend.hosts.common.self_check import prepare_kernels
    from deft_backend.hosts.sglang.start.warm_up import step_tensors
    from deft_backend.settings.config import Settings

    attention = small_attention(max_batch=max_batch, policy=policy)
    assert attention.target.tile_queries == (4, 32, 32)
    launched, calls, real = set(), [], attention.run

    def run(q, k, v, table, lens, *, table_rows, out, k_scale, v_scale, logit_cap, **others):
        assert others == {"sinks": None, "static_launch": False}
        assert k_scale == v_scale == 1.0
        assert not logit_cap
        plan = attention.last_plan
        assert plan is not None
        shapes = tuple(s for s in sorted(ITEM_ORDER) if len(range(*plan.items_of(s))))
        launched.add((shapes, len(plan.reduce_query) > 0))
        calls.append((table.stride(0), table.dtype, lens.dtype, table_rows.dtype, len(q)))
        if len(shapes) == 1:  # the others take too long in the interpreter
            real(q, k, v, table, lens, table_rows=table_rows)

    monkeypatch.setattr(attention, "run", run)
    tensors = step_tensors(make_runner(70), ())
    prepare_kernels(attention, tensors, Settings(min_batch=1), on_device=False)
    fewest = {0: 1, 1: 5, 2: 1}
    assert launched == {
        (shapes, reduces)
        for count in range(1, len(reached) + 1)
        for shapes in itertools.combinations(sorted(reached), count)
        for reduces in (False, True)
        if sum(fewest[shape] for shape in shapes) <= max_batch
    }
    assert {call[:4] for call in calls} == {(70, torch.int32, torch.int64, torch.int64)}
    assert max(call[4] for call in calls) <= max_batch


@pytest.mark.usefixtures("host")
def test_a_gpu_whose_check_fails_is_refused(monkeypatch):
    from deft_backend.hosts.common import self_check
    from deft_backend.hosts.common.limits import Unsupported
    from deft_backend.hosts.sglang.start.warm_up import step_tensors
    from deft_backend.settings.config import Settings

    def start(reason):
        monkeypatch.setattr(self_check, "failed_self_check", lambda *given, **named: reason)
        tensors = step_tensors(make_runner(500), ())
        self_check.prepare_kernels(
            small_attention(max_batch=4), tensors, Settings(), on_device=True
        )

    monkeypatch.setattr(self_check, "warm_up_attention", lambda *given, **named: None)
    start(None)
    with pytest.raises(Unsupported, match="row 1 is off"):
        start("L40S has no recorded results: row 1 is off")


@pytest.mark.parametrize("scales", [(None, None), (0.02, 0.5)])
def test_scales_of_a_cache_of_eight_bits(server, scales):
    """The pool divides by a layer's scales, and tree attention multiplies with them."""
    k_scale, v_scale = (None if s is None else torch.tensor(s) for s in scales)
    written, ran, unit = [], {}, torch.ones(1)

    def run(q, *args, **named):
        ran.update(named)
        return torch.zeros_like(q)

    server.layers.attention = SimpleNamespace(
        kv_dtype=torch.float8_e4m3fn, dtype=torch.bfloat16, unit_scale=unit, run=run,
        num_query_heads=4, num_kv_heads=2, head_dim=64,
    )  # fmt: skip
    server.layers.pool = SimpleNamespace(
        set_kv_buffer=lambda layer, location, k, v, *given: written.extend(given),
        get_key_buffer=lambda layer_id: None, get_value_buffer=lambda layer_id: None,
    )  # fmt: skip
    server.step(server.batch(), make_layer(k_scale=k_scale, v_scale=v_scale))
    assert written == [k_scale, v_scale]
    assert ran["k_scale"] is (unit if k_scale is None else k_scale)
    assert ran["v_scale"] is (unit if v_scale is None else v_scale)
