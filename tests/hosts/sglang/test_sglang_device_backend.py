"""The attention backend that plans on the device: eager steps, captures and replays."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deft_backend.hosts.sglang.versions import read_end
from deft_backend.settings.config import Settings
from deft_backend.telemetry.shown_batch import forest_of
from failure_lines import raising
from sglang_fakes import (
    FakePool,
    FakeServer,
    SWAKVPool,
    Tree,
    device_planned,
    make_batch,
    make_layer,
    make_state,
    mode,
    query,
    recording_backend,
    requests_of,
    small_attention,
)

PREFIX = list(range(10, 510))
SHARED = [[*PREFIX, 4, 5], [*PREFIX, 9]]


@pytest.fixture
def server(host):
    """A backend over a host that records its calls; the host's graphs hold static tensors."""
    _, table, lens = requests_of(SHARED, Tree())
    calls, pool, attention, state = [], FakePool(520), small_attention(max_batch=4), make_state()
    own = recording_backend(host, pool, table, calls)()
    backend = device_planned(own, attention, state, Settings(min_batch=2))

    def batch(kind="decode", size=2):
        rows, lengths = [1, 2, 0, 0, 0, 0][:size], [*lens.tolist(), 1, 1, 1, 1][:size]
        return make_batch(kind, table, rows, lengths)

    return FakeServer(
        backend=backend, calls=calls, batch=batch, state=state, table=table, attention=attention,
        pool=pool, own=own, steps=backend.deft,
    )  # fmt: skip


def written(server, batch, layer_id=0):
    """Whether the step's keys are in the cache."""
    keys = server.pool.get_key_buffer(layer_id)[batch.out_cache_loc]
    return torch.equal(keys.flatten(), query(len(keys))[1].flatten())


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


def test_beams_read_their_new_parents_tokens(host):
    """Between steps, the host copies the rows of surviving beams to other beams' rows."""
    fork = pytest.importorskip("sglang.srt.beam_search.fork")

    prompt, grown, rows = 8, 200, torch.tensor([1, 2, 3])
    calls, pool = [], FakePool(2500)
    table = np.zeros((4, prompt + 4 * grown), dtype=np.int32)
    table[1, :prompt] = range(1, 1 + prompt)
    own = recording_backend(host, pool, table, calls)()
    pages = own.req_to_token_pool.req_to_token
    backend = device_planned(own, small_attention(max_batch=4), make_state(), Settings(min_batch=2))
    server = FakeServer(backend=backend, pool=pool, table=table)
    fork.alias_members_prompt_kv(pages, rows[1:], 1, prompt)
    for step, parents in enumerate(([0, 0, 1], [2, 2, 0], [0, 2, 2], [0, 1, 2])):
        begin, length = prompt + step * grown, prompt + (step + 1) * grown
        first = 20 + 3 * begin
        pages[rows, begin:length] = torch.arange(first, first + 3 * grown).view(3, -1).int()
        batch = make_batch("decode", table, rows, [length] * 3, rids=["leader"])
        server.close(server.step(batch), batch)
        fork.remap_kv_mapping(pages, rows, torch.tensor(parents), prompt, length)
    assert calls == []


def test_what_is_captured_plans_whatever_it_is_replayed_for(server):
    """Capture with a dummy batch padded to four; replay by hand over other rows and lengths."""
    static, real = server.batch(size=4), server.batch(size=4)
    static.seq_lens.fill_(1)
    static.req_pool_indices.fill_(0)
    server.capture(static)
    assert server.state.batch is None  # the captured batch is not one of the server's

    static.seq_lens.copy_(real.seq_lens)
    static.req_pool_indices.copy_(real.req_pool_indices)
    server.replay(SimpleNamespace(**{**vars(real), "seq_lens": static.seq_lens}))
    assert server.calls == ["capture", "in graph"], "the replay needs no metadata of the host"
    assert server.steps.replayed_tree(real)
    assert forest_of(server.state.batch).tokens_stored == len(PREFIX) + 5
    # The graph holds the planning, and the launches of one layer.
    table = torch.from_numpy(server.table)
    server.attention.plan_on_device(table, static.seq_lens, table_rows=static.req_pool_indices)
    out = server.attention.run(
        query(4)[0].view(4, 4, 64), server.pool.k, server.pool.v, table, static.seq_lens,
        table_rows=static.req_pool_indices, sm_scale=0.125, static_launch=True,
    )  # fmt: skip
    server.close(out.view(4, -1), real)


def test_small_large_and_other_batches_are_the_hosts(server):
    for size in (1, 5):
        server.step(server.batch(size=size))
        for in_capture in (True, False):
            batch = server.batch(size=size)
            server.backend.init_forward_metadata_out_graph(batch, in_capture=in_capture)
        assert not server.steps.replayed_tree(None)
    server.step(server.batch("extend"))
    assert server.calls == ["metadata", "decode", "capture", "replay"] * 2 + ["metadata", "extend"]
    assert server.state.steps_host == {
        "batch smaller than DEFT_MIN_BATCH=2": 2,
        "batch larger than the 4 requests that a plan holds": 2,
    }  # fmt: skip
    assert server.state.counters().steps_tree == 0


def test_a_graph_that_was_captured_with_a_hosts_layer_gets_its_metadata(server):
    server.capture(server.batch(), make_layer(sliding_window_size=8, layer_id=1))
    assert server.calls == ["capture", "in graph", "decode"]
    assert server.state.device_tree_layers == server.state.num_layers - 1
    server.replay(server.batch())
    assert server.calls[-1] == "replay"
    assert server.steps.replayed_tree(None)


def test_planning_that_fails_leaves_the_capture_to_the_host(server, monkeypatch, failures):
    monkeypatch.setattr(
        server.attention, "plan_on_device", raising(RuntimeError("out of resources"))
    )
    server.capture(server.batch())
    server.replay(server.batch())
    server.backend.init_forward_metadata(server.batch())
    assert server.calls == ["capture", "in graph", "decode", "replay", "metadata"]
    assert not server.steps.replayed_tree(None)
    assert failures == [
        "deft: planning failed (RuntimeError('out of resources')). The host's kernel decodes from "
        "now on; restart the server to use tree attention again."
    ]
    failures.clear()
    assert server.state.steps_host == {"planning failed": 2}


def test_a_kernel_that_fails_leaves_the_capture_to_the_host(server, monkeypatch, failures):
    monkeypatch.setattr(server.attention, "run", raising(RuntimeError("out of resources")))
    batch = server.batch()
    server.capture(batch, make_layer(), make_layer(layer_id=1))
    assert written(server, batch, 0)
    assert written(server, batch, 1)
    server.replay(server.batch())
    assert server.calls == ["capture", "in graph", "decode", "decode", "replay"]
    assert "a kernel failed" in failures.pop()
    # The graph holds the host's kernel. It may also hold the launches before the failure.
    assert server.state.steps_host == {"kernel failed": 1}
    assert server.steps.replayed_tree(None)


@pytest.mark.parametrize("fails", [False, True])
def test_keys_and_values_of_8_bits_are_divided_once(host, fails, monkeypatch, failures):
    """The host's pool divides its arguments in place; after a failed kernel the host gets them."""
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool

    pool = MHATokenToKVPool(
        size=64, page_size=1, dtype=torch.float8_e4m3fn, head_num=2, head_dim=64, layer_num=1,
        device="cpu", enable_memory_saver=False,
    )  # fmt: skip
    table = torch.arange(64, dtype=torch.int32).view(2, 32).numpy().copy()

    class Host(recording_backend(host, pool, table, [])):
        def forward_decode(self, q, k, v, layer, batch, save_kv_cache=True):
            if save_kv_cache:
                location = KVWriteLoc(batch.out_cache_loc, None)
                pool.set_kv_buffer(layer, location, k, v, layer.k_scale, layer.v_scale)
            return torch.zeros_like(q)

    attention = small_attention(dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn, max_batch=4)
    backend = device_planned(Host(), attention, make_state(), Settings(min_batch=1))
    batch = make_batch("decode", table, [0, 1], [5, 6])
    backend.init_forward_metadata(batch)
    if fails:
        monkeypatch.setattr(attention, "run", raising(RuntimeError("a launch failed")))
    k, v = (torch.full((2, 2, 64), value, dtype=torch.bfloat16) for value in (1.0, 2.0))
    layer = make_layer(k_scale=torch.tensor(0.5), v_scale=torch.tensor(0.25))
    q = torch.randn(2, 256).bfloat16()
    out = backend.forward_decode(q, k, v, layer, batch)
    assert out.any() != fails
    assert ["a launch failed" in line for line in failures] == [True] * fails
    failures.clear()
    stored = (pool.get_key_buffer(0)[[4, 37]].float(), pool.get_value_buffer(0)[[4, 37]].float())
    assert (stored[0] * 0.5 == 1.0).all()
    assert (stored[1] * 0.25 == 2.0).all()


def test_graphs_captured_anew_hold_what_is_captured_then(server, monkeypatch, failures):
    """A capture after a kernel has failed, as after new weights: the graphs are the host's."""
    server.capture(server.batch())
    server.replay(server.batch())
    assert server.calls == ["capture", "in graph"]  # tree attention needs no metadata
    with monkeypatch.context() as broken:
        broken.setattr(server.attention, "run", raising(torch.OutOfMemoryError("out of memory")))
        server.step(server.batch())
    assert "out of memory" in failures.pop()
    server.calls.clear()
    server.capture(server.batch())
    server.replay(server.batch())
    assert server.calls == ["capture", "in graph", "decode", "replay"]
    assert server.steps.replayed_tree(None)  # an earlier graph of the size may still exist
    assert server.state.counters().steps_host["kernel failed"] == 1


def test_the_device_counts_steps_but_not_those_of_captures(server):
    def capture():
        server.backend.init_forward_metadata_out_graph(warm, in_capture=True)
        server.backend.init_forward_metadata_in_graph(warm)

    warm = server.batch()
    capture()
    for _ in range(3):
        server.backend.init_forward_metadata(server.batch())
    counters = server.state.counters()
    assert counters.steps_tree == 3
    tokens = counters.kv_bytes_query_guided // (2 * server.state.token_bytes)
    assert tokens == 3 * int(warm.seq_lens.sum())
    assert counters.kv_bytes_read < 0.6 * counters.kv_bytes_query_guided
    for _ in range(2):  # the server has new weights and captures again
        capture()
    assert server.state.counters() == counters
    server.backend.init_forward_metadata(server.batch())
    assert server.state.counters().steps_tree == 4
    assert server.state.counters().kv_bytes_read * 3 == counters.kv_bytes_read * 4


def test_page_tables_are_read_until_the_end_once_a_graph_holds_tree_attention(server):
    """The host asks before it names the graph that it replays."""
    backend, decode = server.backend, mode("decode")
    type(server.own).shared_read_ends = lambda self, mode: "the host's"
    assert backend.shared_read_ends(decode) == "the host's"
    backend.init_forward_metadata_out_graph(server.batch(), in_capture=True)
    assert backend.shared_read_ends(decode) == read_end()
    assert backend.shared_read_ends(mode("extend")) == "the host's"
    # The host captures the size again, for itself: its earlier graph may still run.
    server.steps.layers.failure.reason = "planning failed"
    backend.init_forward_metadata_out_graph(server.batch(), in_capture=True)
    assert backend.shared_read_ends(decode) == read_end()
    server.replay(server.batch())
    assert server.steps.replayed_tree(None)


def test_a_capture_is_compiled_for_before_it_begins(server, caplog):
    """Graphs' own tensors may have other dtypes than eager steps'."""
    asked = []
    server.steps.compile_for = lambda *dtypes: asked.append(dtypes)
    batch = server.batch()
    batch.seq_lens = batch.seq_lens.int()
    server.backend.init_forward_metadata_out_graph(batch, in_capture=True)
    server.replay(batch)  # launches what is captured
    server.backend.init_forward_metadata_out_graph(server.batch(size=1), in_capture=True)
    assert asked == [(torch.int64, torch.int32)]
    # Kernels that do not compile leave decode to the host.
    server.calls.clear()
    server.steps.compile_for = raising(RuntimeError("no assembler"))
    server.capture(server.batch())
    assert server.calls == ["capture", "in graph", "decode"]
    assert "no assembler" in caplog.text
    assert server.steps.layers.failure.reason == "kernels not compiled"


def test_full_and_windowed_layers_share_a_graph(server, host, caplog):
    """The host's metadata is part of each replay; the full layer writes to the full pool alone."""
    pool = SWAKVPool(full=[1], windowed=[0, 2], slots=520)
    left = dict.fromkeys((0, 2), "a sliding window")
    own = recording_backend(host, pool, server.table, server.calls)()
    server.backend = device_planned(
        own, server.attention, server.state, Settings(min_batch=2), host_layers=left
    )
    server.pool = SimpleNamespace(**dict(zip("kv", pool.full_kv_pool.buffers[1], strict=True)))
    first, full, last = (
        make_layer(layer_id=at, sliding_window_size=8 if at in left else -1) for at in range(3)
    )
    eager = server.batch()
    server.backend.init_forward_metadata(eager)
    server.forward(eager, first)
    server.close(server.forward(eager, full), eager)
    server.forward(eager, last)
    assert server.calls == ["metadata", "decode", "decode"]
    for layer_id in range(3):
        keys = pool.get_key_buffer(layer_id)[eager.out_cache_loc]
        assert torch.equal(keys.flatten(), query()[1].flatten())

    server.calls.clear()
    static = server.batch()
    server.close(server.capture(static, first, last, full), static)
    server.replay(server.batch())
    assert server.calls == ["capture", "in graph", "decode", "decode", "replay"]
    # The log has named these layers at the start; the counters leave them out.
    assert "a sliding window" not in caplog.text
    assert server.state.device_tree_layers is None
