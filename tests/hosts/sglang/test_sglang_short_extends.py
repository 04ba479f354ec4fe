"""SGLang's prefills of a few new tokens a request: which ones tree attention computes."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deft_backend.hosts.common.short_extends import ShortExtends
from deft_backend.settings.config import Settings
from failure_lines import raising
from sglang_fakes import (
    RADIX_CACHE,
    FakePool,
    Tree,
    decode_attention,
    device_planned,
    load_host,
    make_batch,
    make_layer,
    make_state,
    query,
    recording_backend,
    requests_of,
    small_attention,
)

PREFIX = list(range(10, 110))
PROMPTS = [[*PREFIX, 4, 5], [*PREFIX, 9], [*PREFIX, 7, 7, 7]]


class Server:
    """A backend whose server computes short extends, and batches of it."""

    def __init__(self, prompts=PROMPTS, new=16):
        from deft_backend.hosts.sglang.step.extends import ExtendSteps

        self.requests, self.table, self.most = requests_of(prompts, Tree(), private=new)
        self.calls = []
        self.pool = FakePool(int(self.table.max()) + 1)
        host = recording_backend(load_host(), self.pool, self.table, self.calls)()
        self.attention = small_attention(max_batch=8)
        self.state, self.runner = make_state(), object()
        self.backend = device_planned(host, self.attention, self.state, Settings())
        self.layers = self.backend.deft.layers
        rule = ShortExtends.beside(self.attention, Settings(short_extends=16), 2)
        assert rule is not None
        self.backend.deft.extends = self.extends = ExtendSteps(rule, self.layers, self.runner)

    def batch(self, new, kind="extend", **changes):
        """A prefill in which request `r` computes `new[r]` tokens, as the host's scheduler tells
        it."""
        lens = [int(most) - 16 + n for most, n in zip(self.most, new, strict=True)]
        rows = torch.arange(1, len(new) + 1)
        slots = [self.table[row, n - k : n] for row, n, k in zip(rows, lens, new, strict=True)]
        forward_batch = make_batch(
            kind, self.table, rows, lens, seq_lens_cpu=torch.tensor(lens),
            extend_seq_lens=torch.tensor(new, dtype=torch.int32), extend_seq_lens_cpu=new,
            out_cache_loc=torch.cat([torch.from_numpy(each) for each in slots]).long(),
            rids=[request.rid for request in self.requests], **changes,
        )  # fmt: skip
        scheduled = SimpleNamespace(reqs=self.requests, tree_cache=RADIX_CACHE)
        self.extends.observe(forward_batch, scheduled, self.runner)
        return forward_batch

    def run(self, batch, rows=0):
        """One layer of a step: its output, and what it should be; `rows` of padding."""
        tokens = len(batch.out_cache_loc)
        q, k, v = query(tokens + rows)
        self.backend.init_forward_metadata(batch)
        given = SimpleNamespace(**vars(batch)) if rows else batch
        out = self.backend.forward_extend(q, k, v, make_layer(), given)
        places = [
            (int(row), int(length) - new + token + 1)
            for row, length, new in zip(
                batch.req_pool_indices, batch.seq_lens, batch.extend_seq_lens_cpu, strict=True
            )
            for token in range(new)
        ]
        expected = decode_attention(
            self.pool, self.table, [row for row, _ in places], [n for _, n in places], q[:tokens]
        )
        return out, expected


def close(out, expected):
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("new", [[3, 1, 4], [16, 2, 9]])
def test_new_tokens_behind_a_shared_prefix(new):
    server = Server()
    batch = server.batch(new)
    out, expected = server.run(batch)
    close(out, expected)
    assert server.calls == ["metadata"]  # layers of the host's own could run
    assert (server.state.short_extends, server.state.counters().decode_steps) == (1, 0)
    assert server.backend.shared_read_ends(batch.forward_mode) is not None


def test_a_prefill_graphs_padded_copy_with_decoding_requests():
    server = Server()
    out, expected = server.run(server.batch([1, 1, 6], "mixed"), rows=3)
    close(out[:8], expected)
    assert not out[8:].any()
    assert server.state.short_extends == 1


@settings(max_examples=6, deadline=None)
@given(st.data())
def test_random_trees(data):
    paths = st.lists(st.integers(0, 2), min_size=0, max_size=4)
    prompts = [
        [*PREFIX[:80], *(token for each in data.draw(paths) for token in [each] * 30)]
        for _ in range(data.draw(st.integers(2, 5)))
    ]
    server = Server(prompts)
    new = data.draw(st.lists(st.integers(1, 16), min_size=len(prompts), max_size=len(prompts)))
    out, expected = server.run(server.batch(new))
    close(out, expected)
    assert server.state.short_extends == 1


@pytest.mark.parametrize(
    ("new", "kind", "changes"),
    [
        ([17, 1, 1], "extend", {}),
        ([3, 1, 4], "split_prefill", {}),
        ([3, 1, 4], "extend", {"mm_inputs": [None, object(), None]}),
        ([3, 1, 4], "extend", {"encoder_lens": torch.ones(3)}),
        ([3, 1, 4], "extend", {"global_num_tokens_cpu": [8]}),
    ],
)
def test_other_prefills_are_the_hosts(new, kind, changes):
    server = Server()
    server.run(server.batch(new, kind, **changes))
    assert server.calls == ["metadata", "extend"]
    assert server.state.short_extends == 0


def test_batches_that_share_little_or_are_unknown_are_the_hosts():
    apart = Server([[n, *range(300, 400)] for n in range(3)])
    apart.run(apart.batch([3, 1, 4]))
    unknown = Server()
    batch = unknown.batch([3, 1, 4])
    batch.rids = list(batch.rids)  # made for another batch
    unknown.run(batch)
    for server in (apart, unknown):
        assert server.calls == ["metadata", "extend"]


def test_a_decode_step_follows_with_its_own_plan():
    server = Server()
    close(*server.run(server.batch([3, 1, 4])))
    decode = server.batch([5, 5, 5], "decode")
    decode.out_cache_loc = decode.out_cache_loc[4::5]
    q, k, v = query(3)
    server.backend.init_forward_metadata(decode)
    out = server.backend.forward_decode(q, k, v, make_layer(), decode)
    rows, lens = decode.req_pool_indices.tolist(), decode.seq_lens.tolist()
    close(out, decode_attention(server.pool, server.table, rows, lens, q))
    assert (server.state.short_extends, server.calls) == (1, ["metadata"])


def test_a_failed_short_extend_is_the_hosts(monkeypatch, failures):
    server = Server()
    fail = raising(RuntimeError("no such instruction"))
    monkeypatch.setattr(server.extends.rule.attention, "run", fail)
    server.run(server.batch([3, 1, 4]))
    assert server.calls == ["metadata", "extend"]
    assert server.state.short_extends == 0
    assert len(failures) == 1
    failures.clear()
    server.run(server.batch([3, 1, 4]))
    assert server.calls == ["metadata", "extend"] * 2
