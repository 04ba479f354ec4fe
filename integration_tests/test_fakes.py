"""The fakes of the unit tests call the adapter as the installed host does."""

import pytest

from host_calls import calls_of, noted_calls, unlike
from integration_tests.common.answers import PREFIX, TOPICS, on
from integration_tests.common.server import Ask, together
from integration_tests.hosts import HOST


def sglang():
    import sglang_fakes as fakes
    from attention_checks import tree_attention

    _, table, lens = fakes.requests_of([[5, 6, 7], [5, 6, 8]])
    pool = fakes.MHATokenToKVPool()
    own = fakes.recording_backend(fakes.load_host(), pool, table)()
    server = fakes.FakeServer(own, tree_attention(max_batch=4))
    for kind in ("extend", "decode"):
        batch = fakes.make_batch(kind, table, [1, 2], lens)
        server.step(batch, fakes.make_layer(), fakes.make_layer(layer_id=1))


def vllm():
    import vllm_fakes as fakes
    from deft_backend.hosts.vllm import server

    batch, cache = fakes.cached(fakes.Batch([70, 80, 90], shared=4))
    layers = fakes.tree_layers()
    builder = layers.builder(fakes.make_spec())
    prefixes = server._current.prefixes
    for _ in range(2):
        if prefixes is not None:
            prefixes.observe(fakes.message(batch))
        metadata = builder.build(0, batch.common())
        for implementation in layers.impls:
            fakes.run(implementation, batch, cache, metadata)


@on("default")
def test_the_fakes_call_as_the_host_does(server, monkeypatch, tmp_path):
    server.complete([together([Ask(PREFIX + f"Of {topic} they wrote") for topic in TOPICS[:3]])])
    monkeypatch.setenv("DEFT_CACHE_DIR", str(tmp_path))
    if HOST == "vllm":
        monkeypatch.setattr(pytest.importorskip("deft_backend.hosts.vllm.server"), "_current", None)
    with noted_calls(HOST) as calls:
        {"sglang": sglang, "vllm": vllm}[HOST]()
    assert len(calls) >= 6
    assert unlike(calls, calls_of(server.process.command.environment["DEFT_CACHE_DIR"])) == []
