"""The fake server of SGLang's unit tests calls the adapter as the host does."""

from host_calls import calls_of, noted_calls, unlike
from integration_tests.common.answers import PREFIX, TOPICS, on
from integration_tests.sglang_server import Ask
from sglang_fakes import (
    MHATokenToKVPool,
    Tree,
    fake_server,
    load_host,
    make_batch,
    make_layer,
    recording_backend,
    requests_of,
    small_attention,
)


@on("default")
def test_the_fake_server_calls_as_the_host_does(server):
    server.complete([Ask(PREFIX + f"Tonight it spoke of {t}.") for t in TOPICS[:3]])
    _, table, lens = requests_of([[5, 6, 7], [5, 6, 8]], Tree())
    pool = MHATokenToKVPool()
    own = recording_backend(load_host(), pool, table, [])()
    fake = fake_server(own, small_attention(max_batch=4), table, [], pool)
    with noted_calls("sglang") as calls:
        for kind in ("extend", "decode"):
            fake.step(make_batch(kind, table, [1, 2], lens), make_layer(), make_layer(layer_id=1))
    assert len(calls) == 6
    real = calls_of(server.process.command.environment["DEFT_CACHE_DIR"])
    assert unlike(calls, real) == []
