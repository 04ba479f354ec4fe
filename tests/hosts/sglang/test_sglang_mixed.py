"""Steps in which some requests decode and others prefill: each row has the host's own result."""

import inspect
import itertools
import random
from ast import literal_eval
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import sglang_fakes as fakes
from attention_checks import repeated_layers, tree_attention
from deft_backend.hosts.common.eager_steps import DECODES, PREFILLS
from deft_backend.hosts.sglang import tree_layers, versions
from deft_backend.hosts.sglang.mixed import EagerSharing, MixedSteps
from deft_backend.hosts.sglang.prefixes import BatchObserver
from deft_backend.settings.config import Settings
from deft_backend.telemetry.counters import MIXED, Content, Steps
from drawings import check_asked
from failure_lines import raising


def first_rows(batch, tokens, requests):
    """As the host slices a batch, as far as the fake host looks."""
    return SimpleNamespace(
        forward_mode=batch.forward_mode,
        batch_size=requests,
        seq_lens=batch.seq_lens[:requests],
        req_pool_indices=batch.req_pool_indices[:requests],
        extend_seq_lens_cpu=batch.extend_seq_lens_cpu[:requests],
        out_cache_loc=batch.out_cache_loc[:tokens],
    )


def test_the_hosts_slice_has_so_many_tokens_and_requests(host, monkeypatch):
    """The real method, whose batches the fake ones above cannot replace, takes these arguments."""
    from sglang.srt.batch_overlap.two_batch_overlap import TboForwardBatchPreparer as Preparer

    takes = inspect.signature(Preparer.filter_batch)
    asked = lambda *given, **named: takes.bind(*given, **named).arguments  # noqa: E731
    monkeypatch.setattr(Preparer, "filter_batch", asked)
    found = versions.first_rows("batch", 5, 3)
    ranges = [
        [found[f"{end}_{what}_index"] for end in ("start", "end")] for what in ("token", "seq")
    ]
    assert ranges == [[0, 5], [0, 3]]


@pytest.fixture(autouse=True)
def sliced(monkeypatch):
    monkeypatch.setattr("deft_backend.hosts.sglang.mixed.first_rows", first_rows)


class MixedServer(fakes.FakeServer):
    """A server whose last requests decode and whose first ones prefill `chunks`."""

    def __init__(self, host, prompts, chunks):
        self.requests, table, self.lens = fakes.requests_of(prompts)
        self.chunks, self.observer = chunks, BatchObserver("runner")
        self.tree_cache = fakes.RADIX_CACHE
        pool = fakes.MHATokenToKVPool(int(table.max()) + 1)

        class Host(fakes.recording_backend(host, pool, table)):
            """Computes every row over the page table, if its metadata is of the same batch."""

            def init_forward_metadata(self, batch):
                self.calls.append(f"metadata of {batch.batch_size}")
                self.prepared = batch

            def forward_extend(self, q, k, v, layer, batch, save_kv_cache=True, **kwargs):
                assert self.prepared.extend_seq_lens_cpu == batch.extend_seq_lens_cpu
                self.calls.append(f"extend of {batch.batch_size}")
                self.write(k, v, layer, batch, save_kv_cache)
                return attended(q, batch, pool, layer.layer_id, table).float()

            forward_decode = forward_extend

        super().__init__(Host(), tree_attention(max_batch=8), self.next_batch)
        sharing = EagerSharing(self.layers, self.observer)
        self.steps.mixed = MixedSteps(self.layers, Settings(min_batch=2), sharing)
        self.mixed = self.steps.mixed

    def next_batch(self, kind="mixed"):
        """The next step: a chunk of each prefill, and a token of each request that decodes. In a
        decode step these are alone.
        """
        first = 0 if kind == "mixed" else len(self.chunks)
        decoding = len(self.lens) - len(self.chunks)
        lens = torch.from_numpy(self.lens[first:].copy())
        new = [*self.chunks, *[1] * decoding][first:]
        rows, requests = range(first + 1, len(self.lens) + 1), self.requests[first:]
        rids = [request.rid for request in requests]
        of_step = {"seq_lens_cpu": lens, "extend_seq_lens_cpu": new, "rids": rids}
        made = fakes.make_batch(kind, self.table, rows, lens, new, **of_step)
        decode = self.requests[len(self.chunks) :] if kind == "mixed" else None
        self.observe(made, reqs=requests, decoding_reqs=decode)
        return made

    def observe(self, batch, **scheduled):
        """The host has made this batch of what it scheduled."""
        seen = {"tree_cache": self.tree_cache, "decoding_reqs": None, **scheduled}
        self.observer.observe(batch, SimpleNamespace(**seen), "runner")

    def run(self, batch=None, given=None, *, layers=1, padding=0):
        """Some layers of a step; every row is that of attention over what is then in the cache."""
        batch = batch or self.batch()
        self.backend.init_forward_metadata(batch)
        tokens = len(batch.out_cache_loc)
        for layer_id in range(layers):
            q, k, v = fakes.query(tokens + padding, layer_id)
            out = self.backend.forward(q, k, v, fakes.make_layer(layer_id=layer_id), given or batch)
            for held, new in zip(self.pool.buffers[layer_id], (k, v), strict=True):
                assert torch.equal(held[batch.out_cache_loc], new[:tokens])
            expected = attended(q[:tokens], batch, self.pool, layer_id, self.table)
            torch.testing.assert_close(out[:tokens].double(), expected, rtol=1e-5, atol=1e-6)
            assert not out[tokens:].any()


def attended(q, batch, pool, layer_id, table):
    """[T, 256] float64: each new token attends to its request's tokens up to itself."""
    rows, lens = [], []
    for row, length, new in zip(
        batch.req_pool_indices.tolist(),
        batch.seq_lens.tolist(),
        batch.extend_seq_lens_cpu,
        strict=True,
    ):
        rows += [row] * new
        lens += range(length - new + 1, length + 1)
    held = SimpleNamespace(**dict(zip("kv", pool.buffers[layer_id], strict=True)))
    out = fakes.decode_attention(held, table, rows, lens, q[: len(rows)])
    return torch.cat([out, out.new_zeros((len(q) - len(rows), out.shape[1]))])


SHARED = list(range(100, 160))
PROMPTS = [[*range(200, 230)], [*SHARED, 1], [*SHARED, 2, 3], [*SHARED[:20], 4]]


@pytest.fixture
def server(host):
    """One request prefills a chunk of 16 tokens, three decode behind a shared prefix."""
    return MixedServer(host, PROMPTS, [16])


def counted(server):
    steps = server.state.counters().steps
    return {(content.kind, content.reason): of.steps for content, of in steps.items()}


def test_decode_rows_go_through_the_tree_and_the_others_through_the_host(server):
    batch = server.batch()
    server.run(batch, layers=2)
    assert server.calls == ["metadata of 1", "extend of 1", "extend of 1"]
    held = server.state.token_bytes * server.state.num_layers
    read = server.state.counters()
    assert read.steps == {Content(MIXED, None): Steps(1, 3, int(server.lens[1:].sum()) * held)}
    assert read.kv_bytes_read < 0.75 * read.kv_bytes_query_guided
    # Other addresses than those of every other step would make kernels compile under load.
    inputs = server.layers.step.inputs
    ours, theirs = (inputs.seq_lens, inputs.table_rows), (batch.seq_lens, batch.req_pool_indices)
    assert [part.data_ptr() % 16 for part in ours] == [0, 0]
    assert [part[1:].data_ptr() % 16 for part in theirs] == [8, 8]
    assert [part.tolist() for part in ours] == [part[1:].tolist() for part in theirs]


@pytest.mark.parametrize("seed", range(12))
def test_chunks_of_every_size(host, seed):
    """Chunks of 1 to 64 tokens, behind a prefix or without one; requests come and go."""
    draw = random.Random(seed)
    prefill = draw.randint(1, 3)
    prompts = [[draw.randrange(3) for _ in range(draw.randint(65, 90))] for _ in range(prefill)]
    for _ in range(draw.randint(2, 5)):
        prompts.append([*SHARED[: draw.choice((10, 30, 60))], draw.randrange(9) + 300])
    server = MixedServer(host, prompts, [draw.randint(1, 64) for _ in range(prefill)])
    for _ in range(3):
        server.run(layers=2)
        if len(server.requests) - prefill > 2:  # a request is aborted
            server.requests, server.lens = server.requests[:-1], server.lens[:-1]
        server.chunks = [draw.randint(1, 64) for _ in range(prefill)]
    assert counted(server) == {(MIXED, None): 3}
    assert not [call for call in server.calls if call.endswith(f"of {len(prompts)}")]


def test_layers_in_a_prefill_graph_get_a_padded_copy(server):
    batch = server.batch()
    padded = SimpleNamespace(**vars(batch))
    server.run(batch, padded, padding=13)
    assert server.calls == ["metadata of 1", "extend of 1"]


def test_an_unknown_copy_of_a_split_batch_is_the_hosts(server, caplog):
    """Whose metadata covers the rest alone when the layer comes: it is made again for all rows."""
    batch = server.batch()
    copy = SimpleNamespace(**{**vars(batch), "extend_seq_lens_cpu": [*batch.extend_seq_lens_cpu]})
    server.run(batch, copy, layers=2)
    assert server.calls == ["metadata of 1", "metadata of 4", "extend of 4", "extend of 4"]
    assert caplog.text.count("an unknown copy of its batch") == 1
    assert counted(server) == {(MIXED, "kernel failed"): 1}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompts": [PROMPTS[0], [1, 2], [3, 4]]}, PREFILLS),
        ({"prompts": PROMPTS[:2]}, "batch smaller than DEFT_MIN_BATCH=2"),
        ({"seq_lens_cpu": None}, "mixed batch of another form"),
        ({"tree": object()}, "unreadable prefix cache"),
    ],
)
def test_what_is_not_split_is_the_hosts(host, change, reason):
    server = MixedServer(host, change.pop("prompts", PROMPTS), [16])
    server.tree_cache = change.pop("tree", fakes.RADIX_CACHE)
    batch = server.batch()
    vars(batch).update(change)
    server.run(batch)
    size = len(server.requests)
    assert server.calls == [f"metadata of {size}", f"extend of {size}"]
    assert counted(server) == {(MIXED, reason): 1}


def test_the_form_of_batches_that_are_split(server):
    """By the number of rows that decode, and what differs from a batch of four requests."""

    def answer(rows, *words):
        batch = server.batch()
        for name, _, value in (word.partition("=") for word in words):
            value = literal_eval(value)
            setattr(batch, name, torch.ones(value) if name == "seq_lens" else value)
        yield str(server.mixed._refused(batch, int(rows)))

    check_asked(Path(__file__).with_name("mixed.txt"), answer)
    server.mixed.unsplit = "not now"
    assert server.mixed._refused(server.batch(), 3) == "not now"
    server.layers.failure.reason = "kernel failed"
    assert server.mixed._refused(server.batch(), 3) == "kernel failed"


def test_the_tree_is_read_again_after_other_requests_or_32_steps(server):
    due = server.mixed.sharing._is_due
    assert [due(requests) for requests in (16, 18, 14, 19, 13)] == [True, False, False, True, True]
    assert [due(13) for _ in range(32)] == [False] * 31 + [True]


def test_a_prefill_alone_is_the_hosts(server):
    """Also a batch that nobody has observed."""
    batch = server.batch()
    batch.forward_mode = fakes.mode("extend")
    server.observe(batch, reqs=server.requests, tree_cache=None)
    server.run(batch)
    batch.rids = ["another"]
    server.run(batch)
    assert server.calls == ["metadata of 4", "extend of 4"] * 2
    assert counted(server) == {}


def test_what_a_rank_decodes_as_a_prefill_is_counted(server):
    """With DP attention, beside a prompt of another rank."""
    server.mixed.unsplit = "DP attention pads batches"
    batch = server.batch()
    batch.forward_mode = fakes.mode("extend")
    server.observe(batch, reqs=server.requests, decoding_reqs=server.requests)
    server.run(batch)
    assert server.calls == ["metadata of 4", "extend of 4"]
    assert counted(server) == {("mixed", "DP attention pads batches"): 1}


def test_a_graph_of_prefills_is_the_hosts(server):
    """The host hands a view of the batch whose lengths are padded with zeros."""
    batch = server.batch()
    padded = torch.cat([batch.seq_lens_cpu, torch.zeros(4, dtype=torch.int64)])
    server.replay(SimpleNamespace(**{**vars(batch), "batch_size": 8, "seq_lens_cpu": padded}))
    server.replay(SimpleNamespace(**{**vars(batch), "rids": ["not observed"]}))
    assert server.calls == ["replay", "replay"]
    ((content, steps),) = server.state.counters().steps.items()
    assert content == (MIXED, "in a graph of prefills")
    assert (steps.rows, steps.kv_bytes) == (3, int(server.lens[1:].sum()) * 2 * 1024)


@pytest.mark.parametrize(("broken", "before"), [("plan_batch", 0), ("run", 0), ("run", 1)])
def test_after_a_failure_the_host_computes_the_whole_batch(
    server, monkeypatch, failures, broken, before
):
    """Also the step's other rows of the same layer, and later steps. Layers `before` it ran."""
    real = getattr(server.attention, broken)
    calls = itertools.chain([real] * before, itertools.repeat(raising(RuntimeError("no room"))))
    with monkeypatch.context() as patch:
        patch.setattr(
            server.attention, broken, lambda *given, **named: next(calls)(*given, **named)
        )
        server.run(layers=2 + before)
    assert "no room" in failures.pop()
    done = ["extend of 1"] * before
    assert server.calls == ["metadata of 1", *done, "metadata of 4", "extend of 4", "extend of 4"]
    failed = {"run": "kernel failed", "plan_batch": "planning failed"}[broken]
    first = None if before else failed  # a step of which a layer has run is ours
    assert counted(server) == {(MIXED, first): 1}
    server.run()
    assert sum(counted(server).values()) == 2
    assert counted(server)[MIXED, failed] == 2 - before


def test_a_batch_that_the_host_cannot_slice_is_left_to_it(server, monkeypatch, caplog):
    refuses = raising(ValueError("Field x has value, but is not yet supported"))
    monkeypatch.setattr("deft_backend.hosts.sglang.mixed.first_rows", refuses)
    for _ in range(2):
        server.run()
    assert caplog.text.count("Field x has value") == 1
    assert counted(server) == {(MIXED, "the host cannot slice such batches"): 2}


def test_verification_compares_whole_mixed_steps(server, monkeypatch, failures):
    """``DEFT_VERIFY``: the host computes the whole batch as well, over metadata of its own."""
    server.layers._verify = True
    server.run(layers=2)
    once = ["metadata of 1", "extend of 1", "metadata of 4", "extend of 4"]
    assert server.calls == once * 2
    real = server.attention.run
    monkeypatch.setattr(
        server.attention, "run", lambda *given, **named: real(*given, **named).add_(1)
    )
    server.run(layers=2)
    assert "differ by" in failures.pop()
    assert counted(server) == {(MIXED, None): 1, (MIXED, "kernel failed"): 1}


def test_page_tables_are_read_until_a_split_step_ends(server):
    type(server.own).shared_read_ends = lambda self, mode: "the host's"
    type(server.own).resolve_prefill_shared_read_ends = lambda self, batch, **_: "the host's"
    ends = server.backend.resolve_prefill_shared_read_ends
    batch = server.batch()
    assert ends(batch, num_qo_tokens=19) == "the host's"
    server.backend.init_forward_metadata(batch)
    assert ends(batch, num_qo_tokens=19) == versions.read_end()
    assert server.backend.shared_read_ends(fakes.mode("extend")) == versions.read_end()
    server.mixed.unsplit = "not now"
    server.backend.init_forward_metadata(server.batch())
    assert ends(batch, num_qo_tokens=19) == "the host's"


def on_gpu(server, ms):
    """Let a server decide as on a GPU whose memory moves a layer's token in `ms`."""
    sharing, state = server.mixed.sharing, server.state
    state.num_layers, server.steps.eager = 32, sharing
    sharing.costs = SimpleNamespace(transfer_ms=lambda saved: saved / state.token_bytes * ms)


@pytest.mark.parametrize(
    ("kind", "ms", "reason"),
    [
        ("mixed", 1.7e-3, PREFILLS),
        ("mixed", 1.9e-3, None),
        ("decode", 2.6e-4, DECODES),
        ("decode", 2.8e-4, None),
    ],
)
def test_on_a_gpu_the_saved_reads_must_pay_for_the_launches(server, kind, ms, reason):
    """80 tokens are read less often, in 32 layers. Where all would be too few, no tree is read."""
    on_gpu(server, ms)
    batch = server.batch(kind)
    server.run(batch, layers=2)
    assert bool(server.mixed.sharing._read_for) is (ms > 2.7e-4)
    assert counted(server) == {(kind, reason): 1}
    assert (f"extend of {len(batch.seq_lens)}" in server.calls) is (reason is not None)


def test_eager_steps_of_unknown_requests_go_through_the_tree(server, caplog):
    on_gpu(server, 1.0)
    for unknown in ({"rids": ["another"]}, {"seq_lens_cpu": None}):
        batch = server.batch("decode")
        vars(batch).update(unknown)
        server.run(batch)
    for cannot in ({"tree_cache": object()}, {"reqs": [SimpleNamespace()] * 2}):  # be read
        batch = server.batch("decode")
        server.observe(batch, **{"reqs": server.requests[1:], **cannot})
        server.run(batch)
    assert counted(server) == {("decode", None): 4}
    assert caplog.text.count("cannot be read (AttributeError") == 1


def test_later_layers_repeat_the_first(server, monkeypatch):
    """Of mixed steps and of decode steps, wherever the pool's tensors are by then, and also after a
    graph was captured.
    """
    server.layers.repeats.on = True
    repeated = repeated_layers(monkeypatch, tree_layers)
    for kind in ("mixed", "decode") * 2:
        batch = server.batch(kind)
        server.run(batch, layers=3)
        assert repeated == [3, 3]  # the first time, one of them is a trial
        repeated.clear()
        server.pool.buffers[1:] = [
            [part.clone() for part in pair] for pair in server.pool.buffers[1:]
        ]
        if kind == "decode":
            server.capture(batch, fakes.make_layer(), fakes.make_layer(layer_id=1))
            assert not repeated
