"""vLLM's prefill steps of a few new tokens a request: which ones tree attention computes."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deft_backend.attention import TreeAttention
from deft_backend.hosts.vllm.report import server
from deft_backend.hosts.vllm.step.extends import CachedPrefixes
from deft_backend.hosts.vllm.step.step import step_of
from failure_lines import raising
from vllm_fakes import (
    Batch,
    Step,
    close,
    make_config,
    make_spec,
    message,
    reference,
    speculating,
    state,
    tree_layers,
)


@pytest.fixture(autouse=True, scope="module")
def switched_on():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEFT_SHORT_EXTENDS", "16")
        yield


LENS = [69, 74, 67, 85]
NEW = [5, 10, 3, 7]


def prompts(batch, **changes):
    """The host's metadata of a batch whose requests all compute prompts."""
    return batch.common(is_prefilling=torch.ones(len(batch.lens), dtype=torch.bool), **changes)


class Extend(Step):
    """A step of prompts, after the scheduler's message."""

    def __init__(self, batch, layers=None, told=None):
        self.told = message(batch) if told is None else told
        super().__init__(batch, layers, prompts(batch))

    def build(self, common=None):
        server._current.prefixes.observe(self.told)
        super().build(common)


@pytest.mark.usefixtures("policy")
@pytest.mark.parametrize(("new", "size"), [([2, 3, 4, 1], 4), (NEW, 16), ([8, 1, 1, 1], 8)])
def test_new_tokens_behind_a_shared_prefix(new, size):
    step = Extend(Batch(LENS, shared=3, query_lens=new))
    assert step.tree.query_tokens == size
    step.check()
    assert state().short_extends == 1
    assert state().counters().decode_steps == state().verified_tokens == 0


@st.composite
def forests(draw):
    """Requests that share blocks in several levels, each with 1 to 16 new tokens of its own."""
    requests = draw(st.integers(2, 5))
    new = draw(st.lists(st.integers(1, 16), min_size=requests, max_size=requests))
    old = draw(st.lists(st.integers(80, 140), min_size=requests, max_size=requests))
    batch = Batch([o + n for o, n in zip(old, new, strict=True)], shared=5, query_lens=new)
    for row in range(1, requests):
        other = draw(st.integers(0, row - 1))
        most = min(old[row], old[other]) // batch.block_size  # blocks without new tokens
        held = draw(st.integers(5, most))
        batch.table[row, :held] = batch.table[other, :held]
    return batch


@settings(max_examples=6, deadline=None)
@given(forests())
def test_random_forests(batch):
    step = Extend(batch, tree_layers(count=1))
    if max(batch.query_lens or ()) > 1:
        assert step.tree is not None
    step.check()


def test_a_plan_of_decode_stays_as_it_is():
    """Prompts arrive between two layers' passes of decode steps; each step has its own plan."""
    layers = tree_layers()
    decode = Step(Batch([40, 37, 65], shared=2), layers)
    expected = reference(decode.batch, decode.cache)
    close(decode.run(0), expected)
    extend = Extend(Batch(LENS, shared=3, query_lens=NEW), layers)
    close(extend.run(0), reference(extend.batch, extend.cache))
    close(decode.run(1), expected)


def test_decoding_requests_and_verifications_beside_prompts():
    layers = tree_layers(make_config(speculative_config=speculating(4)), prefix="model.layers")
    step = Extend(Batch(LENS, shared=3, query_lens=[5, 1, 9, 1]), layers)
    assert step.tree.query_tokens == 16
    step.check()
    assert (state().short_extends, state().verified_tokens) == (1, 0)


@pytest.mark.parametrize(
    ("new", "changes"),
    [
        ([17, 2, 2, 2], {}),  # a longer end of a prompt
        (NEW, {"causal": False}),
        (NEW, {"mm_req_doc_ranges": {1: [(0, 3)]}}),
        ([30, 1, 1, 1], {}),
    ],
)
def test_other_prompts_are_the_hosts(new, changes):
    batch = Batch(LENS, shared=3, query_lens=new)
    layers = tree_layers()
    extends = layers.builder(make_spec()).deft_extends
    server._current.prefixes.observe(message(batch))
    assert extends.step(prompts(batch, **changes)) is None
    assert state().counters().decode_steps == state().short_extends == 0


@pytest.mark.parametrize(
    ("shared", "told"),
    [
        (3, lambda batch: message(Batch(LENS[:3], shared=3, query_lens=NEW[:3]))),  # another batch
        (3, lambda batch: message(batch, scheduled_new_reqs=[])),  # whose blocks nobody knows
        (0, message),  # it shares nothing
    ],
)
def test_an_unknown_batch_is_the_hosts(shared, told):
    batch = Batch(LENS, shared=shared, query_lens=NEW)
    assert Extend(batch, told=told(batch)).tree is None


@pytest.mark.parametrize(("value", "caching"), [("0", True), ("16", False)])
def test_servers_without_short_extends(value, caching, monkeypatch):
    monkeypatch.setenv("DEFT_SHORT_EXTENDS", value)
    config = make_config()
    config.cache_config.enable_prefix_caching = caching
    builder = tree_layers(config).builder(make_spec())
    assert builder.deft_extends is None
    batch = Batch(LENS, shared=3, query_lens=NEW)
    assert step_of(builder.build(0, prompts(batch))) is None


def test_a_lower_limit_leaves_longer_prompts_to_the_host(monkeypatch):
    monkeypatch.setenv("DEFT_SHORT_EXTENDS", "6")
    for new, taken in ([6, 1, 2, 3], True), ([7, 1, 2, 3], False):
        batch = Batch(LENS, shared=3, query_lens=new)
        assert (Extend(batch).tree is not None) is taken


def test_a_failed_short_extend_is_the_hosts(monkeypatch, failures):
    step = Extend(Batch(LENS, shared=3, query_lens=NEW))
    monkeypatch.setattr(TreeAttention, "run", raising(RuntimeError("no such instruction")))
    step.check()
    assert (state().short_extends, state().counters().steps_tree, state().steps_host) == (0, 0, {})
    assert len(failures) == 1
    failures.clear()
    # Decode and prompts are the host's from now on.
    assert Extend(step.batch, step.layers).tree is None


def test_what_requests_share_follows_from_their_blocks():
    prefixes = CachedPrefixes()
    batch = Batch([64, 64, 64], shared=3, query_lens=[2, 2, 2])
    prefixes.observe(message(batch))
    assert prefixes.share(3, 6) == 12 / 6
    assert prefixes.share(3, 5) is None
    assert prefixes.share(2, 6) is None
    gone = message(batch, scheduled_new_reqs=[], finished_req_ids={"0"})
    prefixes.observe(gone)
    assert prefixes.share(3, 6) is None
    resumed = SimpleNamespace(
        req_ids=["0", "1"], resumed_req_ids={"0"}, new_block_ids=[([1, 2, 3, 50],), None]
    )
    gone.finished_req_ids, gone.scheduled_cached_reqs = set(), resumed
    prefixes.observe(gone)
    assert prefixes.share(3, 6) == 12 / 6


def test_blocks_of_hybrids_and_of_long_contexts():
    """The blocks of full attention decide: windows leave null blocks, states hold one."""
    prefixes = CachedPrefixes()
    full = [np.arange(1, 20001), np.concatenate([np.arange(1, 10001), np.arange(20001, 30001)])]
    batch = Batch([64, 64], shared=3, query_lens=[2, 2])
    told = message(batch)
    for new, blocks in zip(told.scheduled_new_reqs, full, strict=True):
        new.block_ids = ([0] * 30000 + [7], blocks.tolist(), [9])
    prefixes.observe(told)
    share = prefixes.share(2, 4)
    assert share == pytest.approx(40000 / 30000, rel=1e-3)
