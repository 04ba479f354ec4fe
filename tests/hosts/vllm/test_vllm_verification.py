"""vLLM's verification of draft chains: the adapter's choices and its results."""

import copy
import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from deft_backend.attention import TreeAttention
from deft_backend.hosts.vllm import server
from deft_backend.hosts.vllm.layers import drafts
from deft_backend.hosts.vllm.step import step_of
from deft_backend.telemetry.counters import Counters
from deft_patches.vllm import observe_steps
from vllm_fakes import (
    Batch,
    Cache,
    Layers,
    Step,
    close,
    make_config,
    make_spec,
    reference,
    run,
    speculating,
    state,
    tree_layers,
)

LENS = [40, 37, 33, 65, 5]


def make_layers(tokens=4, **kwargs):
    config = make_config(speculative_config=speculating(tokens))
    return tree_layers(config, prefix="model.layers", **kwargs)


@pytest.mark.parametrize("query_lens", [[5, 5, 5, 5, 5], [5, 1, 1, 4, 2], [1, 2, 1, 1, 1]])
@pytest.mark.usefixtures("policy")
def test_rows_of_one_length_and_of_several(query_lens):
    step = Step(Batch(LENS, shared=2, query_lens=query_lens), make_layers())
    assert step.tree is not None
    assert step.tree.query_tokens == 5  # one number of tokens for all batches
    step.check()
    assert state().counters().verified_tokens == sum(query_lens)
    assert state().counters().steps_tree == 1


@pytest.mark.usefixtures("policy")
def test_a_server_counts_from_its_first_request(monkeypatch):
    """vLLM warms up with verifications like those of requests, before it captures graphs."""
    monkeypatch.setattr(server, "untold", lambda config: None)
    step = Step(Batch(LENS, shared=2, query_lens=[5, 1, 1, 4, 2]), make_layers())
    step.check()
    assert replace(state().counters(), compile_seconds=0.0) == Counters()
    assert server._current is not None
    observe = server._current.observe
    assert observe in observe_steps._observers
    assert server._current.prefixes.observe in observe_steps._observers
    observe(None)
    assert observe not in observe_steps._observers
    for _ in range(2):
        step.build()
        step.check()
    found = state().counters()
    assert (found.steps_tree, found.plans, found.verified_tokens) == (2, 2, 26)
    assert found.kv_bytes_query_guided == 2 * sum(LENS) * state().token_bytes * state().num_layers


def test_the_same_metadata_serves_another_batch_of_a_graph():
    """A replay fills the host's tensors anew: other lengths, fewer requests, fewer tokens."""
    step = Step(Batch(LENS, shared=2, query_lens=[5] * 5), make_layers())
    counted, batch = state().counters().verified_tokens, step.batch
    step.metadata = step.builder.build_for_cudagraph_capture(batch.common())
    other = Batch([35, 38, 41], shared=2, padding=2, query_lens=[5, 5, 5, 0, 0])
    batch.table[:, : other.table.shape[1]] = other.table
    batch.lens.copy_(other.lens)
    batch.starts.copy_(other.starts)
    close(step.run()[:15], reference(batch, step.cache)[:15])
    assert state().counters().verified_tokens == counted == 25  # a capture is no step


def test_padding_tokens_behind_the_batch_are_not_read(monkeypatch):
    batch = Batch([40, 37, 33], shared=2, query_lens=[5, 3, 4])
    step = Step(batch, make_layers(), {"num_actual_tokens": 14})
    rows = []
    attention_run = TreeAttention.run

    def recorded(self, q, *args, **kwargs):
        rows.extend((len(q), len(kwargs["out"])))
        return attention_run(self, q, *args, **kwargs)

    monkeypatch.setattr(TreeAttention, "run", recorded)
    found = step.run(rows=3)
    assert rows == [14, 14]  # kernels may write every row of the batch, and no row behind it
    close(found[:12], reference(batch, step.cache))
    assert found[12:].eq(7.0).all()


@pytest.mark.parametrize("prefilling", [None, torch.tensor([False, False, True, False, False])])
def test_documents_of_prompts_are_the_hosts(prefilling):
    """Their tokens attend to later ones. Once the prompts are computed, they do not matter."""
    batch = Batch(LENS, shared=0, query_lens=[5, 1, 5, 1, 5])
    changes = {"is_prefilling": prefilling, "mm_req_doc_ranges": {1: [(0, 3)], 2: []}}
    step = Step(batch, make_layers(), changes)
    assert step.tree is None
    step.check()
    counters = state().counters()
    assert counters.verified_tokens == counters.steps_tree == 0
    assert counters.total("verification").steps == 1
    decoding = batch.common(mm_req_doc_ranges={1: [(0, 3)]})
    assert step_of(step.builder.build(0, decoding)) is not None


def test_the_draft_models_layers_are_the_hosts(caplog):
    layers = make_layers()
    draft = Layers(layers.backend, layers.config, count=1, prefix="draft_model.model.layers")
    with caplog.at_level(logging.INFO, "deft_backend"):
        builder = draft.builder(make_spec())
    assert builder.deft_group is None
    assert "the draft model gets no tree attention" in caplog.text
    batch = Batch(LENS, shared=2)
    assert step_of(builder.build(0, batch.common())) is None
    target = layers.builder(make_spec())
    metadata = target.build(0, batch.common())
    assert state().num_layers == layers.count
    # A draft's first pass may get the metadata of the target's step.
    cache = Cache(batch.pages, 16)
    close(run(draft.impls[0], batch, cache, metadata), reference(batch, cache))
    assert state().counters().plans == 0
    close(run(layers.impls[0], batch, cache, metadata), reference(batch, cache))
    assert state().counters().plans == state().counters().steps_tree == 1


def test_a_layer_that_the_host_marks_is_the_draft_models():
    """Beside a target with images, a draft's layers may count from 0, with no prefix.

    Their builder may get a copy of the server's configuration; it must not replace the server.
    """
    layers = make_layers()
    group = layers.builder(make_spec()).deft_group
    draft = Layers(layers.backend, layers.config, count=1, prefix="draft.layers")
    layers.config.compilation_config.static_forward_context["draft.layers.0"].is_draft_layer = True
    draft.config = copy.copy(layers.config)
    assert draft.builder(make_spec()).deft_group is None
    assert layers.builder(make_spec()).deft_group is group
    assert state().num_layers == layers.count


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("model.layers.1.self_attn.attn", False),
        ("model.layers.2.self_attn.attn", True),
        ("model.layers.3.self_attn.attn", True),
        ("draft_model.model.layers.0.self_attn.attn", True),
        ("mtp.layers.0.self_attn.attn", True),
        ("model.mtp_layers.0.self_attn.attn", True),
        ("eagle.layers.0.attn", True),
        ("encoder.attn", False),
    ],
)
def test_draft_layers_are_known_by_their_names(name, expected):
    """The target has two layers."""
    assert drafts(name, make_config(speculative_config=speculating(2))) is expected
    assert not drafts(name, make_config())
    unknown = make_config(speculative_config=speculating(2))
    unknown.model_config.hf_text_config = SimpleNamespace()  # not how many layers the target has
    assert drafts(name, unknown) is (expected and not name.startswith("model.layers"))
