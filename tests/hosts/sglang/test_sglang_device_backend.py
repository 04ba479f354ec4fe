"""The attention backend that plans on the device: eager steps, captures and replays."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deft_backend.attention import TreeAttention
from deft_backend.settings.config import Settings
from deft_backend.telemetry.shown_batch import forest_of
from failure_lines import raising
from sglang_fakes import (
    FakePool,
    SWAKVPool,
    Tree,
    decode_attention,
    device_planned,
    load_host,
    make_layer,
    make_state,
    mode,
    recording_backend,
    requests_of,
    small_attention,
)

PREFIX = list(range(10, 510))
SHARED = [[*PREFIX, 4, 5], [*PREFIX, 9]]
DECODE, EXTEND = mode("decode"), mode("extend")


@pytest.fixture
def server():
    """A backend over a host that records its calls; the host's graphs hold static tensors."""
    _, table, lens = requests_of(SHARED, Tree())
    calls = []
    pool = FakePool(520)
    own = recording_backend(load_host(), pool, table, calls)()
    attention = small_attention(max_batch=4)
    state = make_state()
    backend = device_planned(own, attention, state, Settings(min_batch=2))

    def batch(forward_mode=DECODE, size=2):
        rows = torch.tensor([1, 2, 0, 0, 0, 0][:size])
        lengths = torch.tensor([*lens.tolist(), 1, 1, 1, 1][:size])
        slots = torch.tensor([int(table[row, n - 1]) for row, n in zip(rows, lengths, strict=True)])
        return SimpleNamespace(
            forward_mode=forward_mode, batch_size=size, seq_lens=lengths, req_pool_indices=rows,
            out_cache_loc=slots, seq_lens_sum=int(lengths.sum()), seq_lens_cpu=None,
        )  # fmt: skip

    return SimpleNamespace(
        backend=backend, calls=calls, batch=batch, state=state, table=table, attention=attention,
        pool=pool, own=own, steps=backend.deft,
    )  # fmt: skip


def query(size=2):
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(size, heads * 64, generator=generator) for heads in (4, 2, 2))


def expected_attention(server, q, batch):
    rows, lens = batch.req_pool_indices.tolist(), batch.seq_lens.tolist()
    return decode_attention(server.pool, server.table, rows, lens, q)


def check(server, batch, out, q):
    expected = expected_attention(server, q, batch)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)


def test_an_eager_step_is_planned_from_the_page_table(server):
    batch, (q, k, v) = server.batch(), query()
    server.backend.init_forward_metadata(batch)
    out = server.backend.forward(q=q, k=k, v=v, layer=make_layer(), forward_batch=batch)
    assert server.calls == []
    check(server, batch, out, q)
    shown = forest_of(server.state.batch)
    assert (shown.batch_size, shown.tokens_stored) == (2, len(PREFIX) + 5)
    assert server.pool.k[batch.out_cache_loc].flatten().tolist() == k.flatten().tolist()


def test_beams_read_their_new_parents_tokens():
    """Between steps, the host copies the rows of surviving beams to other beams' rows."""
    host = load_host()
    fork = pytest.importorskip("sglang.srt.beam_search.fork")

    prompt, grown, rows = 8, 200, torch.tensor([1, 2, 3])
    calls = []
    pool, table = FakePool(2500), np.zeros((4, prompt + 4 * grown), dtype=np.int32)
    table[1, :prompt] = range(1, 1 + prompt)
    theirs = recording_backend(host, pool, table, calls)()
    pages = theirs.req_to_token_pool.req_to_token
    backend = device_planned(
        theirs, small_attention(max_batch=4), make_state(), Settings(min_batch=2)
    )
    fork.alias_members_prompt_kv(pages, rows[1:], 1, prompt)
    for step, parents in enumerate(([0, 0, 1], [2, 2, 0], [0, 2, 2], [0, 1, 2])):
        begin, length = prompt + step * grown, prompt + (step + 1) * grown
        first = 20 + 3 * begin
        pages[rows, begin:length] = torch.arange(first, first + 3 * grown).view(3, -1).int()
        batch = SimpleNamespace(
            forward_mode=DECODE, batch_size=3, seq_lens=torch.full((3,), length), seq_lens_cpu=None,
            req_pool_indices=rows, out_cache_loc=pages[rows, length - 1].long(), seq_lens_sum=None,
            rids=["leader"],
        )  # fmt: skip
        q, k, v = query(3)
        backend.init_forward_metadata(batch)
        out = backend.forward(q, k, v, make_layer(), batch)
        check(SimpleNamespace(pool=pool, table=table), batch, out, q)
        fork.remap_kv_mapping(pages, rows, torch.tensor(parents), prompt, length)
    assert calls == []


def test_what_is_captured_plans_whatever_it_is_replayed_for(server):
    """Capture with a dummy batch padded to four; replay by hand over other rows and lengths."""
    backend, (q, k, v) = server.backend, query(4)
    static = server.batch(size=4)
    static.seq_lens.fill_(1)
    static.req_pool_indices.fill_(0)
    backend.init_forward_metadata_out_graph(static, in_capture=True)
    backend.init_forward_metadata_in_graph(static)
    backend.forward(q=q, k=k, v=v, layer=make_layer(), forward_batch=static)
    assert server.calls == ["capture", "in graph"]
    assert server.state.batch is None  # the captured batch is not one of the server's

    real = server.batch(size=4)
    static.seq_lens.copy_(real.seq_lens)
    static.req_pool_indices.copy_(real.req_pool_indices)
    view = SimpleNamespace(**{**vars(real), "seq_lens": static.seq_lens})
    backend.init_forward_metadata_out_graph(view)
    assert server.calls == ["capture", "in graph"], "the replay needs no metadata of the host"
    assert server.steps.replayed_tree(real)
    assert forest_of(server.state.batch).tokens_stored == len(PREFIX) + 5
    # The graph holds the planning, and the launches of one layer.
    server.attention.plan_on_device(
        torch.from_numpy(server.table), static.seq_lens, table_rows=static.req_pool_indices
    )
    out = server.attention.run(
        q.view(4, 4, 64), server.pool.k, server.pool.v, torch.from_numpy(server.table),
        static.seq_lens, table_rows=static.req_pool_indices, sm_scale=0.125, static_launch=True,
    )  # fmt: skip
    check(server, real, out.view(4, -1), q)


def test_small_large_and_other_batches_are_the_hosts(server):
    backend = server.backend
    for size in (1, 5):
        q, k, v = query(size)
        backend.init_forward_metadata(server.batch(size=size))
        backend.forward(q, k, v, make_layer(), server.batch(size=size))
        for in_capture in (True, False):
            backend.init_forward_metadata_out_graph(server.batch(size=size), in_capture=in_capture)
        assert not server.steps.replayed_tree(None)
    assert server.calls == ["metadata", "decode", "capture", "replay"] * 2
    batch, (q, k, v) = server.batch(EXTEND), query()
    backend.init_forward_metadata(batch)
    backend.forward(q, k, v, make_layer(), batch)
    assert server.calls[-2:] == ["metadata", "extend"]
    assert server.state.steps_host == {
        "batch smaller than DEFT_MIN_BATCH=2": 2,
        "batch larger than the 4 requests that a plan holds": 2,
    }  # fmt: skip
    assert server.state.steps_tree == 0


def test_a_graph_that_was_captured_with_a_hosts_layer_gets_its_metadata(server):
    backend, batch, (q, k, v) = server.backend, server.batch(), query()
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.init_forward_metadata_in_graph(batch)
    backend.forward(q, k, v, make_layer(sliding_window_size=8, layer_id=1), batch)
    assert server.calls == ["capture", "in graph", "decode"]
    assert server.state.device_tree_layers == server.state.num_layers - 1
    backend.init_forward_metadata_out_graph(server.batch())
    assert server.calls[-1] == "replay"
    assert server.steps.replayed_tree(None)


def test_planning_that_fails_leaves_the_capture_to_the_host(server, monkeypatch, failures):
    monkeypatch.setattr(
        server.attention, "plan_on_device", raising(RuntimeError("out of resources"))
    )
    backend, batch, (q, k, v) = server.backend, server.batch(), query()
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.init_forward_metadata_in_graph(batch)
    backend.forward(q, k, v, make_layer(), batch)
    backend.init_forward_metadata_out_graph(server.batch())
    backend.init_forward_metadata(server.batch())
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
    backend, batch, (q, k, v) = server.backend, server.batch(), query()
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.init_forward_metadata_in_graph(batch)
    for layer_id in range(2):
        backend.forward(q, k, v, make_layer(layer_id=layer_id), batch)
        written = server.pool.get_key_buffer(layer_id)[batch.out_cache_loc]
        assert torch.equal(written.flatten(), k.flatten())
    backend.init_forward_metadata_out_graph(server.batch())
    assert server.calls == ["capture", "in graph", "decode", "decode", "replay"]
    assert "a kernel failed" in failures.pop()
    # The graph holds the host's kernel. It may also hold the launches before the failure.
    assert server.state.steps_host == {"kernel failed": 1}
    assert server.steps.replayed_tree(None)


@pytest.mark.parametrize("fails", [False, True])
def test_keys_and_values_of_8_bits_are_divided_once(fails, monkeypatch, failures):
    """The host's pool divides its arguments in place; after a failed kernel the host gets them."""
    host = load_host()
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

    attention = TreeAttention(
        num_query_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16,
        kv_dtype=torch.float8_e4m3fn, device="cpu", max_batch=4,
    )  # fmt: skip
    backend = device_planned(Host(), attention, make_state(), Settings(min_batch=1))
    lens = torch.tensor([5, 6])
    batch = SimpleNamespace(
        forward_mode=DECODE, batch_size=2, seq_lens=lens, seq_lens_cpu=lens, seq_lens_sum=11,
        req_pool_indices=torch.tensor([0, 1]), out_cache_loc=torch.tensor([4, 37]),
    )  # fmt: skip
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
    backend, (q, k, v) = server.backend, query()

    def capture():
        static = server.batch()
        backend.init_forward_metadata_out_graph(static, in_capture=True)
        backend.init_forward_metadata_in_graph(static)
        backend.forward(q=q, k=k, v=v, layer=make_layer(), forward_batch=static)

    capture()
    backend.init_forward_metadata_out_graph(server.batch())
    assert server.calls == ["capture", "in graph"]  # tree attention needs no metadata
    with monkeypatch.context() as broken:
        broken.setattr(server.attention, "run", raising(torch.OutOfMemoryError("out of memory")))
        eager = server.batch()
        backend.init_forward_metadata(eager)
        backend.forward(q=q, k=k, v=v, layer=make_layer(), forward_batch=eager)
    assert "out of memory" in failures.pop()
    server.calls.clear()
    capture()
    assert server.calls == ["capture", "in graph", "decode"]
    server.calls.clear()
    backend.init_forward_metadata_out_graph(server.batch())
    assert server.calls == ["replay"]
    assert server.steps.replayed_tree(None)  # an earlier graph of the size may still exist
    assert server.state.counters().steps_host["kernel failed"] == 1


def test_batches_are_not_shown_where_they_may_be_asleep(server):
    server.steps._shows = False
    server.backend.init_forward_metadata(server.batch())
    assert server.state.batch is None


def test_the_device_counts_steps_but_not_those_of_captures(server):
    backend, warm = server.backend, server.batch()
    backend.init_forward_metadata_out_graph(warm, in_capture=True)
    backend.init_forward_metadata_in_graph(warm)
    for _ in range(3):
        backend.init_forward_metadata(server.batch())
    counters = server.state.counters()
    assert counters.steps_tree == 3
    tokens = counters.kv_bytes_query_guided // (2 * server.state.token_bytes)
    assert tokens == 3 * int(warm.seq_lens.sum())
    assert counters.kv_bytes_read < 0.6 * counters.kv_bytes_query_guided
    for _ in range(2):  # the server has new weights and captures again
        backend.init_forward_metadata_out_graph(warm, in_capture=True)
        backend.init_forward_metadata_in_graph(warm)
    assert server.state.counters() == counters
    backend.init_forward_metadata(server.batch())
    assert server.state.counters().steps_tree == 4
    assert server.state.counters().kv_bytes_read * 3 == counters.kv_bytes_read * 4


def test_page_tables_are_read_until_the_end_once_a_graph_holds_tree_attention(server):
    """The host asks before it names the graph that it replays."""
    from deft_backend.hosts.sglang.versions import read_end

    backend = server.backend
    type(server.own).shared_read_ends = lambda self, mode: "the host's"
    assert backend.shared_read_ends(DECODE) == "the host's"
    backend.init_forward_metadata_out_graph(server.batch(size=2), in_capture=True)
    assert backend.shared_read_ends(DECODE) == read_end()
    assert backend.shared_read_ends(EXTEND) == "the host's"
    # The host captures the size again, for itself: its earlier graph may still run.
    server.steps.layers.failure.reason = "planning failed"
    backend.init_forward_metadata_out_graph(server.batch(size=2), in_capture=True)
    assert backend.shared_read_ends(DECODE) == read_end()
    backend.init_forward_metadata_out_graph(server.batch(size=2))
    assert server.steps.replayed_tree(None)


def test_a_capture_is_compiled_for_before_it_begins(server):
    """Graphs' own tensors may have other dtypes than eager steps'."""
    asked = []
    server.steps._compile_for = lambda *dtypes: asked.append(dtypes)
    batch = server.batch()
    batch.seq_lens = batch.seq_lens.int()
    server.backend.init_forward_metadata_out_graph(batch, in_capture=True)
    server.backend.init_forward_metadata_out_graph(batch)  # a replay launches what is captured
    server.backend.init_forward_metadata_out_graph(server.batch(size=1), in_capture=True)
    assert asked == [(torch.int64, torch.int32)]


def test_kernels_that_do_not_compile_leave_decode_to_the_host(server, caplog):
    server.steps._compile_for = raising(RuntimeError("no assembler"))
    batch, (q, k, v) = server.batch(), query()
    server.backend.init_forward_metadata_out_graph(batch, in_capture=True)
    server.backend.forward_decode(q, k, v, make_layer(), batch)
    assert server.calls == ["capture", "decode"]
    assert "no assembler" in caplog.text
    assert server.steps.layers.failure.reason == "kernels not compiled"


def test_full_and_windowed_layers_share_a_graph(server, caplog):
    """The host's metadata is part of each replay; the full layer writes to the full pool alone."""
    backend, (q, k, v) = server.backend, query()
    pool = SWAKVPool(full=[1], windowed=[0, 2], slots=520)
    left = dict.fromkeys((0, 2), "a sliding window")
    own = recording_backend(load_host(), pool, server.table, server.calls)()
    backend = device_planned(
        own, server.attention, server.state, Settings(min_batch=2), host_layers=left
    )
    k_full, v_full = pool.full_kv_pool.buffers[1]
    server.pool = SimpleNamespace(k=k_full, v=v_full)
    windowed = [make_layer(layer_id=at, sliding_window_size=8) for at in (0, 2)]

    def forward(batch):
        backend.forward(q, k, v, windowed[0], batch)
        out = backend.forward(q, k, v, make_layer(layer_id=1), batch)
        backend.forward(q, k, v, windowed[1], batch)
        return out

    eager = server.batch()
    backend.init_forward_metadata(eager)
    check(server, eager, forward(eager), q)
    assert server.calls == ["metadata", "decode", "decode"]
    for layer_id in range(3):
        written = pool.get_key_buffer(layer_id)[eager.out_cache_loc]
        assert torch.equal(written.flatten(), k.flatten())

    server.calls.clear()
    static = server.batch()
    backend.init_forward_metadata_out_graph(static, in_capture=True)
    backend.init_forward_metadata_in_graph(static)
    check(server, static, forward(static), q)
    backend.init_forward_metadata_out_graph(server.batch())
    assert server.calls == ["capture", "in graph", "decode", "decode", "replay"]
    # The log has named these layers at the start; the counters leave them out.
    assert "a sliding window" not in caplog.text
    assert server.state.device_tree_layers is None
