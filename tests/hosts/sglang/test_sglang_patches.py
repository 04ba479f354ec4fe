"""The patches of SGLang: what they change, for which model runners, and in which versions."""

from functools import partial
from types import SimpleNamespace

import pytest

from deft_patches.sglang import observe_batch, tree_graphs
from deft_patches.sglang import page_table_fence as fence
from deft_patches.wrapping import is_wrapped, wrap
from failure_lines import raising
from sglang_fakes import mode

pytestmark = pytest.mark.usefixtures("host")


@pytest.fixture
def graphs(monkeypatch):
    monkeypatch.setattr(tree_graphs, "_controllers", {})
    return tree_graphs


def test_a_second_set_of_graphs_is_captured_and_replayed(graphs):
    """The patch against a runner that records: labels and order.

    Later versions capture a size for variants of their own: our label is another one.
    """
    events = []
    runner = SimpleNamespace(model_runner=SimpleNamespace())
    capture = partial(graphs._capture_one_shape, lambda *given: events.append(given), runner, 8)
    capture("forward", None)
    assert events == [(runner, 8, "forward", None, None)]  # no controller: the patch has no effect
    decode = SimpleNamespace(forward_mode=mode("decode"))
    assert graphs._resolve_variant(lambda *_: "lora", runner, decode) == "lora"
    graphs._controllers[id(runner.model_runner)] = SimpleNamespace(
        takes=lambda batch: batch.shared, capture_tree=events.append
    )
    for label, ours in ((None, "deft"), ("lora", "lora+deft")):
        events.clear()
        capture("forward", None, label, "dense")
        own, second = ((runner, 8, "forward", None, name, "dense") for name in (label, ours))
        assert events == [own, True, second, False]
        for shared, kind, expected in (
            (True, "decode", ours),
            (False, "decode", label),
            (True, "extend", label),
            (True, "verify", ours),
        ):
            batch = SimpleNamespace(shared=shared, forward_mode=mode(kind))
            assert graphs._resolve_variant(lambda *_, g=label: g, runner, batch) == expected


def test_page_tables_are_not_written_while_a_graph_of_any_packages_runner_reads_them(graphs):
    """A model runner names the class that captures and replays its decode graphs. The reader knows
    after a replay what the replay reads.
    """
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner

    class Theirs(DecodeCudaGraphRunner):
        def __init__(self, model_runner):
            self.model_runner = model_runner

        def execute(self, forward_batch, pp_proxy_tensors):
            self.model_runner.war_fastpath_read_done_event = "metadata was read"
            return "theirs"

    def replay(mode):
        assert Theirs(model).execute(SimpleNamespace(forward_mode=mode)) == "theirs"
        return model.war_fastpath_read_done_event

    def reader(mode):
        return mode == "decode" and model.war_fastpath_read_done_event is not None

    before = vars(DecodeCudaGraphRunner).copy()
    model = SimpleNamespace(_decode_cuda_graph_runner_cls=lambda: Theirs)
    undo = fence.install(model, reader), graphs.install(model, object())
    modes = ("decode", "extend", "decode", "decode")
    assert [replay(mode) for mode in modes] == [None, "metadata was read", None, None]
    assert is_wrapped(Theirs, "capture_one_shape", graphs._capture_one_shape)
    assert is_wrapped(Theirs, "_resolve_lora_variant", graphs._resolve_variant)
    assert vars(DecodeCudaGraphRunner) == before
    for each in undo:
        each()
    assert replay("decode") == "metadata was read"
    assert not graphs._controllers


def test_a_patch_is_there_whatever_other_plugins_hooked():
    """The host's registry applies hooks to a method only once."""
    from sglang.srt.plugins import hook_registry

    class Runner:
        def execute(self, word):
            return [word]

    def ours(original, owner, word):
        return [*original(owner, word), "ours"]

    hook_registry.Runner = Runner
    registry, kind = hook_registry.HookRegistry, hook_registry.HookType
    target = "sglang.srt.plugins.hook_registry.Runner.execute"
    registry.register(target, lambda made, *args: [*made, "theirs"], kind.AFTER)
    registry.apply_hooks()
    try:
        for _ in range(2):
            wrap(Runner, "execute", ours)
        assert Runner().execute("a") == ["a", "theirs", "ours"]
        registry._patched.discard(target)
        registry.apply_hooks()  # another hook goes around ours: ours is still found
        wrap(Runner, "execute", ours)
        assert Runner().execute("a") == ["a", "theirs", "ours", "theirs"]
        assert not is_wrapped(Runner, "execute", lambda *given: None)
    finally:
        del hook_registry.Runner, registry._hooks[target]
        registry._patched.discard(target)


def test_observers_see_each_new_batch_and_one_that_fails_is_dropped(caplog, monkeypatch):
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    monkeypatch.setattr(observe_batch, "_observers", {})
    made = classmethod(lambda cls, batch, runner: (cls, batch))
    monkeypatch.setattr(ForwardBatch, "init_new", made)
    seen = []
    observers = raising(ValueError("unknown batch")), lambda *given: seen.append(given)
    removes = [observe_batch.install(observer) for observer in observers]
    for _ in range(2):
        assert ForwardBatch.init_new("batch", "runner") == (ForwardBatch, "batch")
    removes[1]()
    ForwardBatch.init_new("batch", "runner")
    assert seen == [((ForwardBatch, "batch"), "batch", "runner")] * 2
    assert caplog.text.count("unknown batch") == 1
