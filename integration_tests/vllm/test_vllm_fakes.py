"""The fakes of vLLM's unit tests call the adapter as the host does."""

from host_calls import calls_of, noted_calls, unlike
from integration_tests.common.answers import PREFIX, TOPICS, on
from integration_tests.vllm.vllm_server import Ask, together


@on("default")
def test_the_fakes_call_as_the_host_does(server, monkeypatch, tmp_path):
    from deft_backend.hosts.vllm import server as ours
    from vllm_fakes import Batch, cached, make_spec, message, run, tree_layers

    server.complete([together([Ask(PREFIX + f"Of {topic} they wrote") for topic in TOPICS[:3]])])
    monkeypatch.setenv("DEFT_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(ours, "_current", None)
    batch, cache = cached(Batch([70, 80, 90], shared=4))
    layers = tree_layers()
    with noted_calls("vllm") as calls:
        builder = layers.builder(make_spec())
        prefixes = ours._current.prefixes
        for _ in range(2):
            if prefixes is not None:
                prefixes.observe(message(batch))
            metadata = builder.build(0, batch.common())
            for implementation in layers.impls:
                run(implementation, batch, cache, metadata)
    assert len(calls) >= 7
    assert unlike(calls, calls_of(server.process.command.environment["DEFT_CACHE_DIR"])) == []
