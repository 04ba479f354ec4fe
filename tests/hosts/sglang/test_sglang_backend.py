"""The attention backend around a stand-in for the host's own backend: who decodes which step."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from deft_backend.hosts.sglang.prefixes.prefix_source import PrefixSource
from deft_backend.hosts.sglang.start.layers import unsupported_layer
from deft_backend.hosts.sglang.step.decode_plan import BatchObserver, DecodePlanner
from deft_backend.planner.encoding import ITEM_ORDER
from failure_lines import raising
from sglang_fakes import (
    EAGER,
    FakePool,
    MHATokenToKVPool,
    Tree,
    decode_attention,
    load_host,
    make_layer,
    make_state,
    mode,
    recording_backend,
    requests_of,
    small_attention,
    tree_layers,
)


@pytest.fixture(scope="module")
def host():
    return load_host()


def test_the_observer_knows_its_batch_by_the_list_of_ids():
    runner, decode = object(), SimpleNamespace(is_decode=lambda: True)
    observer = BatchObserver(runner)
    rids = ["a", "b"]
    made = SimpleNamespace(forward_mode=decode, rids=rids)
    batch = SimpleNamespace(reqs=["ra", "rb"], tree_cache="tree")
    observer.observe(made, batch, runner)
    replaced = SimpleNamespace(forward_mode=decode, rids=rids)
    found = observer.of(replaced)
    assert found is not None
    assert (found.requests, found.tree_cache) == (["ra", "rb"], "tree")
    assert observer.of(SimpleNamespace(rids=["a", "b"])) is None  # equal, not the same
    assert observer.of(SimpleNamespace(rids=None)) is None
    observer.observe(SimpleNamespace(forward_mode=decode, rids=["c"]), batch, object())
    assert observer.of(replaced) is not None  # another runner's batch
    extend = SimpleNamespace(is_decode=lambda: False)
    observer.observe(SimpleNamespace(forward_mode=extend, rids=["d"]), batch, runner)
    assert observer.of(replaced) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"logit_cap": 30.0}, None),
        ({"logit_cap": 30.0, "logit_capping_method": "sigmoid"}, "sigmoid capping"),
        ({"is_cross_attention": True}, "cross attention"),
        ({"attn_type": SimpleNamespace(value="encoder_only")}, "encoder_only attention"),
        ({"sliding_window_size": 0}, "a sliding window"),
        ({"sliding_window_size": 128}, "a sliding window"),
        ({"use_irope": True}, "chunked local attention"),
        ({"pos_encoding_mode": "ALIBI"}, "position encoding ALIBI"),
        ({"xai_temperature_len": 4}, "a temperature"),
        ({"v_head_dim": 128}, "keys of 64 and values of 128"),
        ({"tp_q_head_num": 8}, "8 query and 2 KV heads of 64"),
        ({"qk_head_dim": 128, "v_head_dim": 128}, "4 query and 2 KV heads of 128"),
    ],
)
def test_layers(changes, reason):
    found = unsupported_layer(make_layer(**changes), (4, 2, 64))
    assert found is None if reason is None else reason in str(found)


@pytest.fixture
def server(host):
    """A backend over a fake host backend that records its calls, with two requests that share."""
    from deft_backend.hosts.sglang.step.backend import surround
    from deft_backend.hosts.sglang.step.host_planned import HostPlannedSteps

    requests, table, lens = requests_of([[1, 2, 3, 4, 5], [1, 2, 3, 9]], Tree())
    calls = []
    pool = FakePool()

    class HostBackend(recording_backend(host, pool, table, calls)):
        needs_cpu_seq_lens = False
        extra = "of the host"

        def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
            calls.append("new buffers" if in_capture else "metadata out of graph")

        def support_triton(self):
            return False

    runner = object()
    attention = small_attention(max_batch=4, policy="deft-node")
    state = make_state()
    observer = BatchObserver(runner)
    planner = DecodePlanner(attention, PrefixSource(torch.from_numpy(table)), EAGER, state)
    own = HostBackend()
    steps = HostPlannedSteps(tree_layers(own, attention, state), planner, observer)
    backend = surround(own, steps)

    def batch(decode=True, captured=True):
        made = SimpleNamespace(
            forward_mode=mode("decode" if decode else "extend"), rids=["a", "b"], batch_size=2,
            seq_lens=torch.from_numpy(lens), seq_lens_cpu=torch.from_numpy(lens),
            seq_lens_sum=int(lens.sum()), req_pool_indices=torch.tensor([1, 2]),
            out_cache_loc=torch.tensor([table[i + 1, n - 1] for i, n in enumerate(lens)]),
        )  # fmt: skip
        if captured:
            cache = type("RadixCache", (), {"__module__": "sglang.srt.mem_cache.radix_cache"})()
            observer.observe(made, SimpleNamespace(reqs=requests, tree_cache=cache), runner)
        return made

    return SimpleNamespace(
        backend=backend, calls=calls, batch=batch, state=state, table=table, lens=lens,
        pool=pool, attention=attention, observer=observer, steps=steps, own=own,
        requests=requests, planner=planner,
    )  # fmt: skip


def query(seed=1):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, heads * 64, generator=generator) for heads in (4, 2, 2))


def expected_attention(server, q, scale, sinks=None):
    rows = range(1, len(server.lens) + 1)
    return decode_attention(server.pool, server.table, rows, server.lens, q, scale, sinks)


def test_a_shared_decode_batch_goes_through_the_tree(server):
    batch, (q, k, v) = server.batch(), query()
    server.backend.init_forward_metadata(batch)
    out = server.backend.forward(q=q, k=k, v=v, layer=make_layer(), forward_batch=batch)
    assert server.calls == []
    expected = expected_attention(server, q, 0.125)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    assert server.pool.k[batch.out_cache_loc].flatten().tolist() == k.flatten().tolist()
    assert (server.state.steps_tree, server.state.plans) == (1, 1)
    assert server.state.kv_bytes_read < server.state.kv_bytes_query_guided


def test_a_layers_sinks_are_part_of_its_softmax(server):
    batch, (q, k, v) = server.batch(), query()
    sinks = torch.tensor([2.0, -1.0, 5.0, 0.5])
    server.backend.init_forward_metadata(batch)
    out = server.backend.forward(
        q=q, k=k, v=v, layer=make_layer(), forward_batch=batch, sinks=sinks
    )
    assert server.calls == []
    expected = expected_attention(server, q, 0.125, sinks)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    # The same layer without sinks attends without them.
    out = server.backend.forward(q, k, v, make_layer(), batch)
    torch.testing.assert_close(
        out.double(), expected_attention(server, q, 0.125), rtol=1e-5, atol=1e-6
    )


def test_a_layers_own_scale_and_soft_cap_are_used(server):
    batch, (q, k, v) = server.batch(), query()
    server.backend.init_forward_metadata(batch)
    out = server.backend.forward(q, k, v, make_layer(scaling=0.7), batch)
    expected = expected_attention(server, q, 0.7)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    capped = server.backend.forward(q, k, v, make_layer(scaling=0.7, logit_cap=0.5), batch)
    assert (capped - out).abs().max() > 0.01


def test_layers_that_are_left_to_the_host_get_its_metadata_once(server, caplog):
    batch, (q, k, v) = server.batch(), query()
    server.backend.init_forward_metadata(batch)
    windowed = [make_layer(sliding_window_size=8, layer_id=i) for i in (1, 2)]
    for layer in windowed:
        server.backend.forward(q, k, v, layer, batch)
        written = server.pool.get_key_buffer(layer.layer_id)[batch.out_cache_loc]
        assert torch.equal(written.flatten(), k.flatten())
    assert server.calls == ["metadata", "decode", "decode"]
    assert server.state.steps_tree == 0  # no layer has run through tree attention yet
    server.backend.forward(q, k, v, make_layer(), batch)
    assert server.calls == ["metadata", "decode", "decode"]
    assert caplog.text.count("layers with a sliding window decode through the host's") == 1
    assert server.state.steps_tree == 1


@pytest.mark.parametrize("change", [{"q_rope": torch.zeros(4)}, {"k": None}])
def test_arguments_that_are_not_known_are_handed_on(server, change):
    batch, (q, k, v) = server.batch(), query()
    server.backend.init_forward_metadata(batch)
    server.backend.forward(q, k, v, make_layer(), batch)
    assert server.calls == []
    arguments = {"q": q, "k": k, "v": v, "layer": make_layer(), "forward_batch": batch, **change}
    server.backend.forward(**arguments)
    assert server.calls == ["metadata", "decode"]


@pytest.mark.parametrize(
    "kind", ["extend", "not captured", "padded", "padded lengths", "no lengths"]
)
def test_other_batches_are_handed_on(server, kind):
    batch, (q, k, v) = server.batch(kind != "extend", kind != "not captured"), query()
    if kind == "padded":
        batch.batch_size = 4
    if kind == "padded lengths":
        batch.seq_lens_cpu = torch.cat((batch.seq_lens_cpu, torch.ones(2, dtype=torch.int64)))
    if kind == "no lengths":
        batch.seq_lens_cpu = None
    server.backend.init_forward_metadata(batch)
    server.backend.forward(q, k, v, make_layer(), batch)
    assert server.calls == ["metadata", "extend" if kind == "extend" else "decode"]
    assert server.state.steps_tree == 0
    reasons = {"not captured": "batch without requests", "padded": "padded batch",
               "padded lengths": "padded batch"}  # fmt: skip
    assert list(server.state.steps_host) == ([reasons[kind]] if kind in reasons else [])


def test_a_batch_is_decided_and_counted_once(server):
    """The host asks before it chooses its graph; a following eager step uses the same answer."""
    for steps in (1, 2):
        each = server.batch()
        assert server.steps.takes(each)
        assert server.steps.takes(each)
        server.backend.init_forward_metadata(each)
        assert server.state.steps_tree == steps - 1  # no layer has run yet
        for layer_id in range(2):
            server.backend.forward(*query(), make_layer(layer_id=layer_id), each)
        assert server.state.steps_tree == steps
    other = server.batch(captured=False)
    assert not server.steps.takes(other)
    server.backend.init_forward_metadata(other)
    assert server.state.steps_tree == 2
    assert sum(server.state.steps_host.values()) == 1


def test_a_second_set_of_graphs_is_captured_and_replayed(host):
    """The patch against a runner that records: labels and order."""
    from deft_patches.sglang import tree_graphs as patch

    events = []
    model = SimpleNamespace()
    runner = SimpleNamespace(model_runner=model)

    class Controller:
        def takes(self, batch):
            return bool(batch.shared)

        def capture_tree(self, capturing):
            events.append(capturing)

    def capture(runner, size, forward, stream, label):
        events.append((size, label))

    def batch(shared, decode=True):
        return SimpleNamespace(
            shared=shared, forward_mode=SimpleNamespace(is_decode=lambda: decode)
        )

    patch._capture_one_shape(capture, runner, 8, None)
    assert events == [(8, None)]  # without a controller the patch has no effect
    patch._controllers[id(model)] = Controller()
    try:
        patch._capture_one_shape(capture, runner, 8, None)
        assert events[1:] == [(8, None), True, (8, "deft"), False]
        for given, shared, decode, expected in (
            (None, True, True, "deft"), ("nolora", True, True, "nolora+deft"),
            (None, False, True, None), (None, True, False, None),
        ):  # fmt: skip
            label = patch._resolve_variant(lambda *_, g=given: g, runner, batch(shared, decode))
            assert label == expected
    finally:
        del patch._controllers[id(model)]


def test_page_tables_are_not_written_while_a_graph_reads_them(host):
    from deft_patches.sglang import page_table_fence as patch

    model = SimpleNamespace(war_fastpath_read_done_event=None)
    runner = SimpleNamespace(model_runner=model)

    def execute(runner, batch, proxy):
        model.war_fastpath_read_done_event = "metadata was read"
        return "logits"

    patch._readers[id(model)] = lambda batch: batch == "reads"
    try:
        assert patch._execute(execute, runner, "does not read") == "logits"
        assert model.war_fastpath_read_done_event == "metadata was read"
        assert patch._execute(execute, runner, "reads") == "logits"
        assert model.war_fastpath_read_done_event is None
    finally:
        del patch._readers[id(model)]
    patch._execute(execute, runner, "reads")  # another model runner's
    assert model.war_fastpath_read_done_event == "metadata was read"


def test_other_packages_runners_are_patched_themselves(host):
    """A model runner names the class that captures and replays its decode graphs."""
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    from deft_patches.sglang import page_table_fence as fence
    from deft_patches.sglang import tree_graphs as graphs
    from deft_patches.wrapping import is_wrapped

    class Theirs(DecodeCudaGraphRunner):
        def __init__(self, model_runner):
            self.model_runner = model_runner

        def execute(self, forward_batch, pp_proxy_tensors=None):
            self.model_runner.war_fastpath_read_done_event = "metadata was read"
            return "theirs"

    class Strange(Theirs):
        def execute(self, batches):
            pass

    before = vars(DecodeCudaGraphRunner).copy()
    model = SimpleNamespace(_decode_cuda_graph_runner_cls=lambda: Theirs)
    try:
        fence.install(model, lambda batch: True)
        graphs.install(model, object())
        assert Theirs(model).execute(None) == "theirs"
        assert model.war_fastpath_read_done_event is None
        assert is_wrapped(Theirs, "capture_one_shape", graphs._capture_one_shape)
        assert is_wrapped(Theirs, "_resolve_lora_variant", graphs._resolve_variant)
        assert vars(DecodeCudaGraphRunner) == before
    finally:
        fence.remove(model)
        graphs.remove(model)
    strange = SimpleNamespace(_decode_cuda_graph_runner_cls=lambda: Strange)
    with pytest.raises(RuntimeError, match="execute of Strange takes"):
        fence.install(strange, lambda batch: True)


def test_a_patch_is_there_whatever_other_plugins_hooked(host):
    """The host's registry applies hooks to a method only once."""
    from sglang.srt.plugins import hook_registry

    from deft_patches.wrapping import is_wrapped, wrap

    class Runner:
        def execute(self, word):
            return [word]

        @classmethod
        def make(cls, word):
            return [cls.__name__, word]

    hook_registry.Runner = Runner
    registry, kind = hook_registry.HookRegistry, hook_registry.HookType
    target = "sglang.srt.plugins.hook_registry.Runner.execute"
    registry.register(target, lambda made, *args: [*made, "theirs"], kind.AFTER)
    registry.apply_hooks()
    try:

        def ours(original, owner, word):
            return [*original(owner, word), "ours"]

        for _ in range(2):
            wrap(Runner, "execute", ours)
            wrap(Runner, "make", ours)
        assert Runner().execute("a") == ["a", "theirs", "ours"]
        assert Runner.make("a") == ["Runner", "a", "ours"]
        assert type("Other", (Runner,), {}).make("a") == ["Other", "a", "ours"]
        registry._patched.discard(target)
        registry.apply_hooks()  # another hook goes around ours: ours is still found
        assert Runner().execute("a") == ["a", "theirs", "ours", "theirs"]
        wrap(Runner, "execute", ours)
        assert Runner().execute("a") == ["a", "theirs", "ours", "theirs"]
        assert is_wrapped(Runner, "execute", ours)
        assert not is_wrapped(Runner, "execute", check_nothing)
    finally:
        del hook_registry.Runner, registry._hooks[target]
        registry._patched.discard(target)


def check_nothing():
    """A hook that is not installed."""


def test_graphs_launch_every_kernel_over_whatever_plan_is_there(server):
    """Capture under an empty plan, with a batch of another size; then replay by hand."""
    backend, (q, k, v) = server.backend, query()
    shared = server.batch()
    assert server.steps.takes(shared)  # the step is decided and planned before the host captures
    captured = server.batch(captured=False)
    server.steps.capture_tree(True)
    backend.init_forward_metadata_out_graph(captured, in_capture=True)
    empty = backend.forward(q, k, v, make_layer(), captured)
    assert not empty.any()
    server.steps.capture_tree(False)
    assert server.calls == ["metadata out of graph"]
    # The step's plan is restored: the graph's launches now compute its attention.
    view = SimpleNamespace(forward_mode=shared.forward_mode, out_cache_loc=shared.out_cache_loc)
    backend.init_forward_metadata_out_graph(view)
    assert server.calls == ["metadata out of graph"]  # the replay needs no metadata of the host
    assert server.state.steps_tree == 1
    out = server.attention.run(
        q.view(2, 4, 64), server.pool.get_key_buffer(0), server.pool.get_value_buffer(0),
        torch.from_numpy(server.table), shared.seq_lens, table_rows=shared.req_pool_indices,
        static_launch=True,
    )  # fmt: skip
    expected = server.attention.run(
        q.view(2, 4, 64), server.pool.get_key_buffer(0), server.pool.get_value_buffer(0),
        torch.from_numpy(server.table), shared.seq_lens, table_rows=shared.req_pool_indices,
    )  # fmt: skip
    assert out.any()
    assert torch.equal(out, expected)
    # A replay of another batch, or of a prefill, does not belong to the decision.
    for other in (
        SimpleNamespace(forward_mode=shared.forward_mode, out_cache_loc=torch.zeros(2)),
        SimpleNamespace(
            forward_mode=server.batch(decode=False).forward_mode,
            out_cache_loc=shared.out_cache_loc,
        ),
    ):
        backend.init_forward_metadata_out_graph(other)
    assert server.calls == ["metadata out of graph"] * 3
    assert server.state.steps_tree == 1


def test_the_second_capture_of_a_size_leaves_the_hosts_buffers_to_its_own_graph(server):
    """A host's backend may make new buffers for each capture, and fill only the newest."""
    from deft_patches.sglang import tree_graphs as patch

    def capture(runner, size, forward, stream, label):
        server.calls.append(f"graph {label}")
        batch = server.batch(captured=False)
        server.backend.init_forward_metadata_out_graph(batch, in_capture=True)

    model = SimpleNamespace()
    patch._controllers[id(model)] = server.steps
    try:
        patch._capture_one_shape(capture, SimpleNamespace(model_runner=model), 2, None)
    finally:
        del patch._controllers[id(model)]
    assert server.calls == ["graph None", "new buffers", "graph deft", "metadata out of graph"]
    server.backend.init_forward_metadata_out_graph(server.batch(captured=False), in_capture=True)
    assert server.calls[-1] == "new buffers"  # the next size's


def test_the_host_is_told_until_when_page_tables_are_read(server, host):
    """Tree attention answers "until the end"; otherwise the host's own backend answers. The host
    asks after it has chosen the graph. Without a decision the answer is the safe one."""
    from deft_backend.hosts.sglang.versions import read_end

    backend = server.backend
    decode, extend = server.batch().forward_mode, server.batch(decode=False).forward_mode
    type(server.own).shared_read_ends = lambda self, mode: ("the host's", mode)
    assert backend.shared_read_ends(decode) == read_end()
    assert backend.shared_read_ends(extend) == ("the host's", extend)
    assert server.steps.takes(server.batch())
    assert backend.shared_read_ends(decode) == read_end()
    assert not server.steps.takes(server.batch(captured=False))
    assert backend.shared_read_ends(decode) == ("the host's", decode)
    ends = getattr(host, "SharedReadEnds", None)
    assert read_end() == (None if ends is None else ends.UNKNOWN)


def test_graphs_of_every_version_are_captured_twice(host):
    """Later versions capture a size for variants of their own: our label is another one."""
    from deft_patches.sglang import tree_graphs as patch

    captured = []

    class Controller:
        def capture_tree(self, capturing):
            captured.append(capturing)

        def takes(self, forward_batch):
            return True

    model = SimpleNamespace()
    runner = SimpleNamespace(model_runner=model)
    patch._controllers[id(model)] = Controller()
    try:
        patch._capture_one_shape(lambda *given: captured.append(given), runner, 8, "forward", None,
                                 "lora", "dense")  # fmt: skip
    finally:
        del patch._controllers[id(model)]
    first, second = (runner, 8, "forward", None, "lora", "dense"), (
        runner, 8, "forward", None, "lora+deft", "dense")  # fmt: skip
    assert captured == [first, True, second, False]


def test_a_batch_that_is_padded_after_it_was_decided_on_is_the_hosts(server):
    """Ranks of data-parallel attention agree on a size between graph and eager step."""
    batch, (q, k, v) = server.batch(), query()
    assert server.steps.takes(batch)
    batch.batch_size = 4
    server.backend.init_forward_metadata(batch)
    server.backend.forward(q, k, v, make_layer(), batch)
    assert server.calls == ["metadata", "decode"]
    assert (server.state.steps_tree, server.state.steps_host) == (0, {"padded batch": 1})
    again = server.batch()
    server.backend.init_forward_metadata(again)
    server.backend.forward(q, k, v, make_layer(), again)
    assert server.calls == ["metadata", "decode"]  # tree attention continues with the next batch


def test_a_graph_with_a_layer_of_the_host_gets_the_hosts_metadata(server):
    """Also if tree attention cannot run one call of a layer, but the layer in general."""
    backend, (q, k, v) = server.backend, query()
    shared = server.batch()
    assert server.steps.takes(shared)
    captured = server.batch(captured=False)
    server.steps.capture_tree(True)
    backend.init_forward_metadata_out_graph(captured, in_capture=True)
    backend.forward(q, k, v, make_layer(), captured)
    backend.forward(q, k, v, make_layer(), captured, q_rope=torch.zeros(4))
    server.steps.capture_tree(False)
    assert server.calls == ["metadata out of graph", "decode"]
    view = SimpleNamespace(forward_mode=shared.forward_mode, out_cache_loc=shared.out_cache_loc)
    backend.init_forward_metadata_out_graph(view)
    assert server.calls == ["metadata out of graph", "decode", "metadata out of graph"]


def test_planning_that_fails_costs_a_line(server, failures, monkeypatch):
    monkeypatch.setattr(server.attention, "plan", raising(ValueError("no room")))
    batch, (q, k, v) = server.batch(), query()
    for _ in range(2):
        server.backend.init_forward_metadata(batch)
        server.backend.forward(q, k, v, make_layer(), batch)
    assert server.calls == ["metadata", "decode"] * 2
    assert failures == [
        "deft: planning failed (ValueError('no room')). The host's kernel decodes such batches."
    ]
    failures.clear()
    assert server.state.steps_host == {"planning failed": 2}


def test_a_kernel_that_fails_is_not_tried_again(server, failures, monkeypatch):
    monkeypatch.setattr(server.attention, "run", raising(RuntimeError("out of resources")))
    batch, (q, k, v) = server.batch(), query()
    server.backend.init_forward_metadata(batch)
    for layer_id in range(2):
        server.backend.forward(q, k, v, make_layer(layer_id=layer_id), batch)
        written = server.pool.get_key_buffer(layer_id)[batch.out_cache_loc]
        assert torch.equal(written.flatten(), k.flatten())
    server.backend.init_forward_metadata(server.batch())
    assert server.calls == ["metadata", "decode", "decode", "metadata"]
    assert "a kernel failed (RuntimeError('out of resources'))" in failures.pop()
    assert (server.state.steps_tree, server.state.steps_host) == (0, {"kernel failed": 2})


def test_a_step_counts_once_if_a_later_layer_fails(server, failures, monkeypatch):
    batch, (q, k, v) = server.batch(), query()
    server.backend.init_forward_metadata(batch)
    server.backend.forward(q, k, v, make_layer(), batch)
    monkeypatch.setattr(server.attention, "run", None)
    server.backend.forward(q, k, v, make_layer(layer_id=1), batch)
    assert server.calls == ["metadata", "decode"]
    assert (server.state.steps_tree, server.state.steps_host) == (1, {})
    assert "a kernel failed" in failures.pop()


def test_beams_are_named_where_their_batch_is_the_hosts(server):
    """Beams have rows of the batch, and only their leader has a request."""
    server.requests[0].beam_group = object()
    batch = server.batch()
    batch.batch_size = 4
    server.backend.init_forward_metadata(batch)
    server.backend.forward(*query(), make_layer(), batch)
    assert server.calls == ["metadata", "decode"]
    assert server.state.steps_host == {"beam search": 1}


def test_models_that_call_their_backend_find_its_metadata(server, host):
    """Their calls may read the host's metadata, so tree steps also make it, exactly once."""
    from deft_backend.hosts.sglang.step.backend import surround
    from deft_backend.hosts.sglang.step.host_planned import HostPlannedSteps

    layers = tree_layers(server.own, server.attention, server.state, model_asks=True)
    steps = HostPlannedSteps(layers, server.planner, server.observer)
    del server.own.deft
    backend = surround(server.own, steps)
    batch, (q, k, v) = server.batch(), query()
    backend.init_forward_metadata(batch)
    out = backend.forward(q, k, v, make_layer(), batch)
    backend.forward(q, k, v, make_layer(sliding_window_size=8, layer_id=1), batch)
    assert server.calls == ["metadata", "decode"]
    assert out.any()
    again = server.batch()
    assert steps.takes(again)
    view = SimpleNamespace(forward_mode=again.forward_mode, out_cache_loc=again.out_cache_loc)
    backend.init_forward_metadata_out_graph(view)
    assert server.calls[2:] == ["metadata out of graph"]


class AskingModel(torch.nn.Module):
    """Treats its backend as models of SGLang do: by its class, its attributes and its methods."""

    def __init__(self, backend_class):
        super().__init__()
        self.backend_class = backend_class

    def forward(self, batch):
        from sglang.srt.model_executor.forward_context import get_attn_backend

        backend = get_attn_backend()
        assert isinstance(backend, self.backend_class)
        backend.tail_layer = 7
        backend.prefill_attention_backend_str = "triton"
        assert hasattr(backend, "metadata_of_models")
        assert not hasattr(backend, "init_mha_chunk_metadata")
        return backend.metadata_of_models(batch)


def test_a_model_that_asks_meets_the_hosts_backend(server):
    """Its class, its attributes in both directions, and methods that read them."""
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    own, backend = server.own, server.backend
    kind = type(own)
    kind.metadata_of_models = lambda self, batch: (self.tail_layer, self.forward_metadata, batch)
    own.forward_metadata = "made by the host"
    with forward_context(ForwardContext(attn_backend=backend)):
        assert AskingModel(kind)("batch") == (7, "made by the host", "batch")
    assert (own.tail_layer, own.prefill_attention_backend_str) == (7, "triton")
    own.tail_layer = 8
    assert backend.tail_layer == 8
    del backend.tail_layer
    assert not hasattr(own, "tail_layer")


def test_a_backend_that_keeps_methods_in_its_instances_is_refused(server):
    """Shared attributes would hide ours: the host's kernel would run where we planned."""
    from deft_backend.hosts.sglang.step.backend import surround

    server.own.forward_decode = None
    with pytest.raises(RuntimeError, match="HostBackend sets forward_decode on its instances"):
        surround(server.own, server.steps)


def test_what_the_host_calls_of_itself_is_not_replaced(server, host):
    """The base class prepares an eager step by the two hooks of graphs."""
    del type(server.own).__mro__[1].init_forward_metadata
    batch = server.batch(captured=False)
    server.backend.init_forward_metadata(batch)
    assert server.calls == ["metadata out of graph", "in graph"]
    assert sum(server.state.steps_host.values()) == 1


def test_members_are_the_hosts(server, host):
    """Members of the host's backend, and members that its base class also defines."""
    backend = server.backend
    assert isinstance(backend, host.AttentionBackend)
    assert backend.extra == "of the host"
    assert backend.support_triton() is False
    assert backend.needs_cpu_seq_lens is True  # our own value: the forest needs them
    server.own.needs_cpu_seq_lens = True
    server.steps.needs_cpu_seq_lens = False
    assert backend.needs_cpu_seq_lens is True  # the host's
    with pytest.raises(AttributeError, match="no_such_member"):
        _ = backend.no_such_member
    with pytest.raises(NotImplementedError):  # the host's base class defines it
        backend.init_cuda_graph_state(1, 1)


@pytest.mark.parametrize(
    ("max_batch", "policy", "reached"),
    [(1, "auto", {0}), (20, "auto", {0, 1}), (40, "deft-flatten", {0, 1, 2})],
)  # fmt: skip
def test_warm_up_launches_every_set_of_tiles(host, monkeypatch, max_batch, policy, reached):
    """Launch combinations are compiled in, so the warm-up must run all of them."""
    from deft_backend.attention import TreeAttention
    from deft_backend.hosts.sglang.start.warm_up import warm_up
    from deft_backend.settings.config import Settings

    attention = TreeAttention(
        num_query_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float32, device="cpu",
        max_batch=max_batch, policy=policy,
    )  # fmt: skip
    assert attention.target.tile_queries == (4, 32, 32)
    launched = set()
    calls = []

    def run(
        q, k, v, table, lens, *, table_rows, out, k_scale, v_scale, logit_cap, sinks, static_launch
    ):
        assert not static_launch
        assert k_scale == v_scale == 1.0
        assert not logit_cap
        assert sinks is None
        plan = attention.last_plan
        assert plan is not None
        shapes = tuple(s for s in sorted(ITEM_ORDER) if len(range(*plan.items_of(s))))
        launched.add((shapes, len(plan.reduce_query) > 0))
        calls.append((table.stride(0), table.dtype, lens.dtype, table_rows.dtype, len(q)))
        if len(shapes) == 1:  # the others take too long in the interpreter
            TreeAttention.run(attention, q, k, v, table, lens, table_rows=table_rows)

    monkeypatch.setattr(attention, "run", run)
    pool = MHATokenToKVPool()
    table = torch.zeros((9, 70), dtype=torch.int32)
    warm_up(
        attention,
        SimpleNamespace(
            token_to_kv_pool=pool,
            req_to_token_pool=SimpleNamespace(req_to_token=table),
            server_args=SimpleNamespace(speculative_algorithm=None),
            model=torch.nn.Module(),
        ),
        Settings(min_batch=1),
        (),
        on_device=False,
    )
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


def test_an_unknown_gpu_with_a_wrong_row_is_refused(host, monkeypatch):
    from deft_backend.attention import TreeAttention, tree_attention
    from deft_backend.hosts.common import self_check
    from deft_backend.hosts.sglang.start import warm_up
    from deft_backend.settings.config import Settings

    run_plan = tree_attention.run_plan

    def wrong(config, plan, step, *rest, **named):
        run_plan(config, plan, step, *rest, **named)
        step.out[1] = -step.out[1]

    attention = TreeAttention(
        num_query_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float32, device="cpu",
        max_batch=4,
    )  # fmt: skip
    runner = SimpleNamespace(
        token_to_kv_pool=MHATokenToKVPool(),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros((9, 500), dtype=torch.int32)),
        server_args=SimpleNamespace(speculative_algorithm=None),
        model=torch.nn.Module(),
    )
    monkeypatch.setattr(warm_up, "warm_up_attention", lambda *given, **named: None)
    monkeypatch.setattr(self_check, "gpu_name", lambda device: "NVIDIA L40S")
    warm_up.warm_up(attention, runner, Settings(), (), on_device=True)
    monkeypatch.setattr(tree_attention, "run_plan", wrong)
    with pytest.raises(warm_up.Unsupported, match=r"L40S has no recorded results.* row 1 is"):
        warm_up.warm_up(attention, runner, Settings(), (), on_device=True)


@pytest.mark.parametrize("scales", [(None, None), (0.02, 0.5)])
def test_scales_of_a_cache_of_eight_bits(server, scales):
    """The pool divides by a layer's scales, and tree attention multiplies with them."""
    k_scale, v_scale = (None if s is None else torch.tensor(s) for s in scales)
    written = []
    ran = {}
    unit = torch.ones(1)

    def run(q, *args, **named):
        ran.update(named)
        return torch.zeros_like(q)

    layers = server.steps.layers
    layers.attention = SimpleNamespace(
        kv_dtype=torch.float8_e4m3fn, dtype=torch.bfloat16, unit_scale=unit, run=run,
        num_query_heads=4, num_kv_heads=2, head_dim=64,
    )  # fmt: skip
    layers.pool = SimpleNamespace(
        set_kv_buffer=lambda layer, location, k, v, *given: written.extend(given),
        get_key_buffer=lambda layer_id: None, get_value_buffer=lambda layer_id: None,
    )  # fmt: skip
    batch = server.batch()
    server.backend.init_forward_metadata(batch)
    server.backend.forward(*query(), make_layer(k_scale=k_scale, v_scale=v_scale), batch)
    assert written == [k_scale, v_scale]
    assert ran["k_scale"] is (unit if k_scale is None else k_scale)
    assert ran["v_scale"] is (unit if v_scale is None else v_scale)
