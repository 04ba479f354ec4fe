"""vLLM's batch-invariant mode: a request's bits do not depend on the other requests."""

import random
from dataclasses import replace

import pytest
import torch
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport

from deft_backend.hosts.vllm.factory import unsupported_server
from deft_backend.hosts.vllm.latent import unsupported_latent
from deft_backend.settings.config import Settings
from vllm_cpu_backend import PlainCpuBackend, PlainCpuBuilder, PlainCpuImplementation
from vllm_fakes import (
    DIM,
    KINDS,
    KV_HEADS,
    Batch,
    make_config,
    make_spec,
    reference,
    run,
    speculating,
    tree_layers,
)


@pytest.fixture(autouse=True)
def mode(monkeypatch):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")


def step_of_requests(lens, query_lens, prefilling, shared=2, **changes):
    kind = replace(KINDS["picked"], lens=lens, query_lens=query_lens, prefilling=prefilling)
    return kind.step(shared=shared, changes=changes)


def alone(step, row, query):
    """The output of one request of a step in a step of its own, which decodes one token."""
    batch = Batch([int(step.batch.lens[row])], shared=0)
    batch.table, batch.query = step.batch.table[row : row + 1], query
    metadata = step.builder.build(0, batch.common())
    return run(step.layers.impls[0], batch, step.cache, metadata)


@pytest.mark.parametrize("seed", range(8))
def test_bits_of_a_request_are_those_of_the_request_alone(seed, rests):
    """Any order of requests that decode, that end a prompt by one token, and of longer prompts."""
    draw = random.Random(seed)
    kinds = [draw.choice(["decode", "decode", "end", "prompt"]) for _ in range(7)] + ["decode"]
    draw.shuffle(kinds)
    lens = [draw.randint(40, 700) for _ in kinds]
    queries = [draw.randint(2, 30) if kind == "prompt" else 1 for kind in kinds]
    step = step_of_requests(lens, queries, [kind != "decode" for kind in kinds])
    found, hosts = step.run(), [*rests]
    decodes = [row for row, kind in enumerate(kinds) if kind == "decode"]
    in_front = decodes == list(range(len(decodes)))
    others = len(found) - (len(decodes) if in_front else 0)
    assert hosts == ([others] if len(decodes) < len(kinds) else [])
    own = torch.full(found.shape, 7.0)
    kv = torch.full((2, len(found), KV_HEADS, DIM), float("nan"))
    host = PlainCpuBackend.get_builder_cls().build(step.builder, 0, step.batch.common())
    PlainCpuImplementation.forward(
        step.layers.impls[0], None, step.batch.query, *kv, step.cache.tensor, host, own
    )
    for row, kind in enumerate(kinds):
        rows = slice(int(step.batch.starts[row]), int(step.batch.starts[row + 1]))
        expected = own[rows] if kind != "decode" else alone(step, row, step.batch.query[rows])
        assert torch.equal(found[rows], expected)
    torch.testing.assert_close(
        found.double(), reference(step.batch, step.cache), rtol=2e-5, atol=2e-5
    )


@pytest.mark.parametrize(
    "changes", [{"mm_req_doc_ranges": {3: [(20, 30)]}}, {"seq_lens_cpu_upper_bound": None}]
)
def test_requests_decode_by_tree_attention_where_the_host_slices_no_batch(changes, rests):
    step = step_of_requests([40, 37, 33, 50], [1, 1, 1, 20], [False] * 3 + [True], **changes)
    assert step.tree.picked.requests.tolist() == [0, 1, 2]
    step.check()
    assert rests == [23, 23]


def test_neither_size_nor_sharing_leaves_a_step_to_the_host(monkeypatch):
    monkeypatch.setenv("DEFT_MIN_BATCH", "4")
    for shared in (0, 2):
        step = step_of_requests([40, 33], [1, 9], [False, True], shared=shared)
        assert step.tree.tokens == 1
        step.check()
    assert step.tree.group.attention.policy.name == "invariant"


def test_no_graph_holds_attention(monkeypatch):
    """vLLM would replay a graph of decode steps for a step with a prompt's last token. For some
    models it does not compile in this mode, and breaks graphs at attention.
    """
    compilation = CompilationConfig(
        mode=CompilationMode.NONE, cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE
    )
    config = make_config(compilation_config=compilation)
    builder, level = tree_layers(config).backend.get_builder_cls(), AttentionCGSupport.NEVER
    monkeypatch.setattr(PlainCpuBuilder, "_cudagraph_support", AttentionCGSupport.ALWAYS)
    assert builder.get_cudagraph_support(config, make_spec()) is level
    found = compilation.resolve_cudagraph_mode_and_sizes(level, "deft")
    assert found is CUDAGraphMode.PIECEWISE


@pytest.mark.parametrize(
    ("settings", "changes", "reason"),
    [
        ({}, {}, None),
        ({"DEFT_POLICY": "invariant"}, {}, None),
        ({"DEFT_POLICY": "fasttree"}, {}, "batch-invariant mode takes policy invariant, and"),
        ({"DEFT_MAX_BATCH": "15"}, {}, "server's 16 requests, and they hold 15: give --max-num"),
        ({}, {"speculative_config": speculating(4)}, "batch-invariant mode with drafts"),
    ],
)
def test_servers_that_are_refused(settings, changes, reason, monkeypatch):
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    refused = unsupported_server(make_config(**changes))
    assert refused is None if reason is None else reason in refused
    monkeypatch.setenv("DEFT_MLA", "1")
    assert "of MLA models" in unsupported_latent(PlainCpuBackend, Settings.from_env())
