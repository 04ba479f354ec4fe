"""SGLang's verification of chains and token trees: eager steps, captures and replays."""

from types import SimpleNamespace

import pytest
import torch

import sglang_fakes as fakes
from attention_checks import tree_attention
from counted_steps import host_step
from deft_backend.hosts.sglang import report
from deft_backend.hosts.sglang.step_inputs import Verification
from deft_patches.sglang import observe_batch
from forest_oracle import links_of

PREFIX = list(range(10, 310))
PROMPTS = [[*PREFIX, 4, 5], [*PREFIX, 9]]
N = 4
"""Tokens of a verification: the last accepted one and three draft tokens."""

PARENTS, CHAINS = [[-1, 0, 0, 1], [-1, 0, 1, 1]], [[-1, 0, 1, 2]] * 2


def trees(parents=None):
    """What the host verifies: trees with links, as EAGLE's with ``topk`` of 2, or without."""
    child, sibling = (None, None) if parents is None else links_of(parents)
    given = {"retrieve_next_token": child, "retrieve_next_sibling": sibling}
    return SimpleNamespace(topk=2, draft_token_num=N, **given)


CHAIN, NO_LINKS = SimpleNamespace(topk=1, draft_token_num=N), trees()


@pytest.fixture
def server(host):
    _, table, lens = fakes.requests_of(PROMPTS, private=1 + N)

    class HostBackend(fakes.recording_backend(host, fakes.MHATokenToKVPool(410), table)):
        def update_verify_buffers_to_fill_after_draft(self, spec, bucket):
            self.calls.append("after draft")

    def batch(spec, kind="verify", size=2):
        rows, lengths = [1, 2, 0][:size], [*lens.tolist(), 1 + N][:size]
        return fakes.make_batch(kind, table, rows, lengths, N, spec_info=spec)

    attention = tree_attention(max_batch=3, query_tokens=N)
    verification = Verification(N, attention.max_batch, attention.device)
    return fakes.FakeServer(HostBackend(), attention, batch, verification=verification)


def check(server, batch, parents, out):
    """Attention in float64, token by token: the prefix and the token's ancestors."""
    q = fakes.query(batch.batch_size * N)[0].view(-1, N, 256)
    for request, tree in enumerate(parents):
        prefix = int(batch.seq_lens[request])
        row = server.table[int(batch.req_pool_indices[request])]
        for token in range(N):
            seen, place = [], token
            while place >= 0:
                seen.append(prefix + place)
                place = tree[place]
            held = row[None, [*range(prefix), *seen]]
            own = q[request, token : token + 1]
            expected = fakes.decode_attention(server.pool, held, [0], [held.shape[1]], own)
            found = out.view(-1, N, 256)[request, token : token + 1].double()
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("spec", "parents"), [(CHAIN, CHAINS), (trees(PARENTS), PARENTS), (trees(CHAINS), CHAINS)]
)
def test_an_eager_step(server, spec, parents):
    batch = server.batch(spec)
    check(server, batch, parents, server.step(batch))
    assert server.calls == []
    assert server.state.counters().verified_tokens == 2 * N
    assert server.state.counters().steps_tree == 1
    # The host's pair of backends for prefill and decode calls another method.
    q, k, v = fakes.query(2 * N)
    check(server, batch, parents, server.backend.forward_extend(q, k, v, fakes.make_layer(), batch))


def test_a_block_of_drafts(server):
    """A graph reads no mask if the host knows the backend's class, by its name."""
    module = pytest.importorskip("sglang.srt.speculative.dflash_info")
    batch = server.batch(module.DFlashVerifyInput(None, None, draft_token_num=N))
    check(server, batch, CHAINS, server.step(batch))
    assert server.calls == []
    check(server, batch, CHAINS, server.capture(batch))
    assert server.calls == ["capture", "in graph"]
    assert type(server.backend).__name__ == type(server.own).__name__


def test_rows_beyond_the_requests_query_tokens(server, caplog):
    """With DP attention, the host pads an eager step's tokens to a multiple of its ranks.

    Trees of n-grams have no ``topk``.
    """
    n_grams = trees(PARENTS)
    del n_grams.topk
    for spec, parents in ((CHAIN, CHAINS), (n_grams, PARENTS)):
        batch = server.batch(spec)
        server.backend.init_forward_metadata(batch)
        q, k, v = (torch.cat([x, torch.full_like(x[:1], float("nan"))]) for x in fakes.query(2 * N))
        out = server.backend.forward(q, k, v, fakes.make_layer(), batch, False)
        assert server.calls == []
        assert out.shape == (2 * N + 1, 4 * 64)
        check(server, batch, parents, out[: 2 * N])
        assert not out[2 * N :].any()
    assert not caplog.records


def test_what_is_captured_verifies_whatever_it_is_replayed_for(server):
    """The graph reads lengths, rows and links where the host and the adapter keep them."""
    static = server.batch(NO_LINKS, size=3)
    static.seq_lens.fill_(1)
    static.req_pool_indices.fill_(0)
    server.capture(static)
    assert server.calls == ["capture", "in graph"]
    ends = server.backend.shared_read_ends
    assert ends(fakes.mode("verify")) is ends(fakes.mode("decode"))

    def replay(parents):
        real = server.batch(trees(parents), size=3)
        static.seq_lens.copy_(real.seq_lens)
        static.req_pool_indices.copy_(real.req_pool_indices)
        vars(real).update(seq_lens=static.seq_lens, num_padding=1)
        server.replay(real)
        assert server.steps.reads_during_forward(real.forward_mode)
        return real

    for parents in (PARENTS, CHAINS, PARENTS[::-1]):
        check(server, replay(parents), parents, server.launch(static))
    real = replay(CHAINS)
    # With a stream for plans, the host drafts while it prepares the replay.
    server.backend.update_verify_buffers_to_fill_after_draft(trees(PARENTS), 3)
    check(server, real, PARENTS, server.launch(static))
    assert server.calls == ["capture", *["in graph"] * 4, "after draft", "in graph"]
    assert server.state.counters().verified_tokens == 4 * 2 * N


def test_links_of_batches_that_the_host_verifies_are_not_loaded(server):
    """Such a batch may be larger than the memory for links, and an idle rank has no links."""
    backend, static = server.backend, server.batch(NO_LINKS)
    backend.init_forward_metadata_out_graph(static, in_capture=True)
    held = server.steps.verification._links.clone()
    for spec, size in ((trees([*PARENTS, *PARENTS]), 4), (trees(PARENTS), None), (None, 2)):
        backend.update_verify_buffers_to_fill_after_draft(spec, size)
        assert server.calls[-1] == "after draft"
    assert torch.equal(server.steps.verification._links, held)
    with pytest.raises(RuntimeError, match="no links"):  # a replay cannot do without them
        server.replay(server.batch(NO_LINKS))


def test_verifications_of_another_form_are_the_hosts(server):
    longer = SimpleNamespace(topk=1, draft_token_num=N + 1)
    fewer = trees(PARENTS[:1])
    others = [{"custom_mask": torch.ones(1)}, {"ragged_verify_layout": ()}, {"topk": 2}]
    others = [SimpleNamespace(**{**vars(CHAIN), **other}) for other in others]
    half = [{f"retrieve_next_{name}": None} for name in ("token", "sibling")]
    half = [SimpleNamespace(**{**vars(trees(PARENTS)), **each}) for each in half]
    for spec in (longer, fewer, NO_LINKS, None, *half, *others):
        server.step(server.batch(spec))
    assert server.calls == ["metadata", "extend"] * 9
    assert server.state.counters().steps_host == {
        f"verification of {N + 1} tokens, not {N}": 1,
        "no links between the draft tokens of each request": 4,
        f"verification of None tokens, not {N}": 1,
        "verification of neither chains nor token trees": 3,
    }
    assert server.state.counters().verified_tokens == 0


def test_prefill_and_a_layer_of_another_kind_are_the_hosts(server):
    server.step(server.batch(None, kind="extend"))
    assert not server.state.counters().steps_host  # a prefill is no decode step
    batch = server.batch(CHAIN)
    out = server.step(
        batch, fakes.make_layer(sliding_window_size=8, layer_id=1), fakes.make_layer()
    )
    check(server, batch, CHAINS, out)
    assert server.calls == ["metadata", "extend"] * 2
    server.steps.verification = None  # of a server that does not speculate
    server.step(server.batch(CHAIN))
    assert server.calls == ["metadata", "extend"] * 3


@pytest.mark.parametrize("kind", ["text", "ids"])
def test_the_hosts_own_warm_up_is_not_counted(host, kind, monkeypatch):
    """Counting begins with the first other request, even if it asks while the warm-up decodes."""
    monkeypatch.setattr(observe_batch, "_observers", {})
    state, runner = fakes.make_state(), object()
    report.leave_out_warm_up(state, runner)

    tokenizer = SimpleNamespace(decode=lambda ids, skip_special_tokens: bytes(ids).decode() + " ")

    def step(*prompts, whose=runner):
        (observe,) = observe_batch._observers or (lambda *given: None,)
        asked = [list(prompt) for prompt in prompts]
        with_text = {"tokenizer": tokenizer if kind == "text" else None}
        requests = [SimpleNamespace(origin_input_ids=ids, **with_text) for ids in asked]
        observe(None, SimpleNamespace(reqs=requests), whose)
        host_step(state, "small", tokens=5, rows=len(prompts))

    text = report.WARM_UP_TEXT.encode()
    longer = text + b" " * 35  # more tokens than any tokenizer makes of it
    own, other = (text, longer) if kind == "text" else (report.WARM_UP_IDS, [10, 11, 13])
    for spaces in (0, 0, 34) if kind == "text" else (0, 0):
        step([*own, *b" " * spaces])
    step(own, other, whose=object())  # a draft model's runner
    assert state.counters().decode_steps == 0
    step(own, other)
    assert not observe_batch._observers
    step(own)
    assert state.counters().total() == (2, 3, 10 * state.num_layers * state.token_bytes)
