"""vLLM's builder and implementation with tree attention: their choices and their results."""

from copy import copy
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
from vllm.v1.attention.backend import AttentionCGSupport

from deft_backend.attention import TreeAttention
from deft_backend.hosts.common.latches import FailureLatch
from deft_backend.hosts.vllm import factory, group
from deft_backend.hosts.vllm.backend import cannot_surround, tree_backend
from deft_backend.hosts.vllm.group import GroupAttention
from deft_backend.hosts.vllm.server import server_of
from deft_backend.hosts.vllm.step import step_of
from deft_backend.telemetry.shown_batch import ShownBatchError, forest_of
from failure_lines import raising
from vllm_cpu_backend import PlainCpuBackend
from vllm_fakes import (
    DIM,
    HEADS,
    KV_HEADS,
    Batch,
    Cache,
    Layers,
    Step,
    cached,
    close,
    make_config,
    make_spec,
    reference,
    run,
    state,
    tree_layers,
)

DECODE = [40, 37, 33, 65, 5]


@pytest.mark.parametrize(
    ("policy", "block_size", "layout", "padded"),
    [
        ("auto", 16, "LBNHC", 0),
        ("auto", 128, "LBHNC", 64),
        ("auto", 32, "LHBNC", 0),
        ("auto", 16, "BLHNC", 0),
        ("auto", 64, "BHLNC", 128),
        ("deft-node", 32, "BLNHC", 64),
    ],
    indirect=["policy"],
)
def test_decode_reads_every_layout(block_size, layout, padded, policy):
    batch = Batch([4 * block_size + n for n in (1, 7, 11)] + [3], shared=3, block_size=block_size)
    step = Step(batch)
    step.cache = Cache(batch.pages, block_size, layout, padded)
    step.check()
    assert (state().counters().steps_tree, state().counters().plans) == (1, 1)


def test_a_scale_that_the_model_sets_later_counts():
    """Models behind vLLM's Transformers backend set the scale in a forward."""
    step = Step(Batch(DECODE, shared=2), tree_layers(count=1))
    (impl,) = step.layers.impls
    for impl.scale in (0.7, 0.0, -0.7):
        assert step.tree.group.takes(impl.deft_layer.scaled(impl.scale)) == (impl.scale > 0)
        found = step.check(scale=impl.scale)
        assert not torch.allclose(found.double(), reference(step.batch, step.cache), atol=1e-2)


@pytest.mark.usefixtures("policy")
def test_rows_that_no_request_owns(monkeypatch):
    """A graph may hold more requests than a batch: the outputs of the padding are zeros."""
    monkeypatch.setattr(group, "capturing", lambda tensor: True)
    step = Step(Batch(DECODE, shared=2, padding=3))
    found = step.run(rows=2)
    close(found[:-2], reference(step.batch, step.cache))
    assert found[len(DECODE) : -2].eq(0.0).all()
    assert found[-2:].eq(7.0).all()  # nothing beyond the batch is written


@pytest.mark.parametrize(
    ("spec", "arguments", "reason"),
    [
        ({"dtype": torch.bfloat16}, {}, "KV in torch.bfloat16 under a model in torch.float32"),
        ({"num_kv_heads": 1}, {}, "over a KV cache of 1 heads"),
        ({}, {"sliding_window": 9}, "0 of 2 layers decode through tree attention; 2 with a"),
    ],
)
def test_layers_without_tree_attention_make_no_group(spec, arguments, reason, caplog):
    assert tree_layers(arguments=arguments).builder(make_spec(**spec)).deft_group is None
    (line,) = [line for line in caplog.messages if reason in line]
    # `deft ab` looks for these words.
    assert arguments or "; these layers run through CPU_ATTN alone" in line


@pytest.fixture
def graphs(monkeypatch):
    """The level of our builder over a host's, in a server of this configuration."""

    def level(host, config):
        builder = PlainCpuBackend.get_builder_cls()
        monkeypatch.setattr(builder, "_cudagraph_support", AttentionCGSupport[host])
        ours = tree_backend(PlainCpuBackend).get_builder_cls()
        return ours.get_cudagraph_support(config, None).name

    return level


@pytest.mark.parametrize(
    ("level", "expected"),
    [("ALWAYS", "UNIFORM_BATCH"), ("UNIFORM_SINGLE_TOKEN_DECODE",) * 2, ("NEVER", "NEVER")],
)
def test_graphs_of_uniform_batches_only(level, expected, graphs):
    assert graphs(level, make_config()) == expected
    # A drafter asks with a copy of its server's configuration.
    config = make_config()
    server = server_of(config)
    assert graphs(level, copy(config)) == expected
    assert server_of(config) is server
    # The host decodes all batches of this server itself.
    assert graphs(level, make_config(use_ubatching=True)) == level


@pytest.mark.parametrize(
    ("setting", "asked", "splitting_ops", "got"),
    [
        ("DEFT_VERIFY", "FULL", None, "PIECEWISE"),
        ("DEFT_VERIFY", "FULL", [], "NONE"),
        ("DEFT_VERIFY", "FULL_DECODE_ONLY", [], "NONE"),
        ("DEFT_VERIFY", "PIECEWISE", None, "PIECEWISE"),
        ("VLLM_BATCH_INVARIANT", "FULL_AND_PIECEWISE", "not compiled", "PIECEWISE"),
    ],
)
def test_attention_is_in_no_graph(setting, asked, splitting_ops, got, monkeypatch, graphs):
    """A graph only replays its capture, so it could neither compare results nor give up. In
    batch-invariant mode, vLLM would replay a graph of decode steps for a step with a prompt's last
    token. For some models it does not compile in this mode, and breaks graphs at attention.

    The server starts with whatever graphs it asks for: the host raises for ``FULL`` with a backend
    that supports no graphs.
    """
    monkeypatch.setenv(setting, "1")
    compilation = CompilationConfig(mode=CompilationMode.NONE, cudagraph_mode=CUDAGraphMode[asked])
    if splitting_ops != "not compiled":
        compilation.mode, compilation.splitting_ops = CompilationMode.VLLM_COMPILE, splitting_ops
        compilation.set_splitting_ops_for_v1("naive", 1)
    config = make_config(compilation_config=compilation, use_ubatching=True)
    assert graphs("ALWAYS", config) == "ALWAYS"  # nothing to compare
    config.parallel_config.use_ubatching = False
    assert graphs("ALWAYS", config) == "NEVER"
    level = AttentionCGSupport.NEVER
    left = compilation.cudagraph_mode
    compilation.cudagraph_mode = CUDAGraphMode.FULL
    assert graphs("NEVER", config) == "NEVER"
    assert compilation.cudagraph_mode is CUDAGraphMode.FULL  # the host's own matter
    compilation.cudagraph_mode = left
    assert compilation.resolve_cudagraph_mode_and_sizes(level, "deft") is CUDAGraphMode[got]


def test_cascade_is_for_what_tree_attention_leaves(monkeypatch):
    """Versions from 0.32 on never ask."""
    host = PlainCpuBackend.get_builder_cls()
    builder = tree_layers().builder(make_spec())
    group, builder.deft_group = builder.deft_group, None
    monkeypatch.setattr(
        host, "use_cascade_attention", lambda self, *args, **kwargs: True, raising=False
    )
    assert builder.use_cascade_attention(64, np.array([1, 1, 1]), 4, 2)
    builder.deft_group = group
    rows = (([1, 1, 1], False), ([1, 2, 1], True), ([1], True), ([0, 0], True), ([], True))
    for query_lens, expected in rows:
        assert builder.use_cascade_attention(64, np.array(query_lens), 4, 2) is expected
    group.query_tokens = 2
    assert not builder.use_cascade_attention(64, np.array([1, 2, 1]), 4, 2)


class Causal(PlainCpuBackend):
    """Another backend than the one beside it."""


@pytest.mark.parametrize("captured", [False, True])
def test_a_backend_made_of_two_is_surrounded(captured):
    """vLLM's own choice for Gemma 3 with images: a backend for images and one for the rest."""
    composite = pytest.importorskip("vllm.v1.attention.backends.composite")
    host = composite.create_composite_attention_backend(
        PlainCpuBackend,
        Causal,
        name="Two",
        backend_name="CPU_ATTN",
        module=__name__,
        routing_policy=composite.MMPrefixAttentionRouting,
    )
    assert cannot_surround(host) is None
    layers = Layers(tree_backend(host), make_config(), count=1)
    positional = (HEADS, DIM, DIM**-0.5, KV_HEADS, None, None, "auto", None, "decoder", None)
    assert layers.backend.get_impl_cls()(*positional).deft_layer == layers.impls[0].deft_layer
    builder = layers.builder(make_spec())
    batch, cache = cached(Batch(DECODE, shared=2))
    build = builder.build_for_cudagraph_capture if captured else partial(builder.build, 0)
    metadata = build(batch.common())
    close(run(layers.impls[0], batch, cache, metadata), reference(batch, cache))
    assert step_of(metadata).ran
    assert state().counters().decode_steps == (0 if captured else 1)
    prompts = Batch([40, 33], shared=1, query_lens=[6, 1])
    metadata = builder.build(0, prompts.common())
    assert step_of(metadata) is None
    close(run(layers.impls[0], prompts, cache, metadata), reference(prompts, cache))


def test_steps_of_equal_layers_are_counted_once():
    """The host builds builders twice if it profiles its graphs; another server starts at zero.

    Other differences between two builders of the same layers must not make a step fail.
    """
    layers = tree_layers()
    first = Step(Batch(DECODE, shared=2), layers)
    again = Step(Batch(DECODE, shared=2), layers, page_size_padded=1 << 20)
    other = layers.builder(make_spec(block_size=32))
    assert again.builder.deft_group is first.builder.deft_group is not other.deft_group
    other.build(0, first.batch.common())
    for step in (first, again):
        step.run()
    assert state().counters().steps_tree == 2
    new = tree_layers().builder(make_spec())
    assert new.deft_group is not first.builder.deft_group
    assert state().counters().steps_tree == 0


@pytest.mark.parametrize("replayed", [True, False])
def test_a_graph_outlives_a_failure(replayed, failures):
    """A graph that was captured before still holds tree attention, so it decodes its steps.

    A step of its size may also run outside of it.
    """
    step = Step(Batch(DECODE, shared=2))
    batch = step.batch
    step.capture()
    step.builder.deft_group.failure.kernel_failed(RuntimeError("planted"))
    failures.clear()
    before = state().counters()
    step.build()
    if replayed:  # the launches again, without Python of ours
        step.builder.deft_group.attention.plan_batch(batch.table, batch.lens)
    else:
        step.check()
    counted = state().counters() - before
    assert counted.decode_steps == 1
    assert counted.steps_tree == counted.plans == int(replayed)
    assert counted.steps_host == ({} if replayed else {"kernel failed": 1})
    other = Batch(DECODE[:3], shared=2)  # no graph of this size
    assert step_of(step.builder.build(0, other.common())) is None


def test_a_graph_in_whose_capture_a_kernel_failed_is_the_hosts(monkeypatch, failures):
    step = Step(Batch(DECODE, shared=2))
    with monkeypatch.context() as patch:
        patch.setattr(TreeAttention, "run", raising(RuntimeError("no such instruction")))
        step.capture()
    failures.clear()
    before = state().counters()
    step.build()
    assert step.tree is None
    assert (state().counters() - before).steps_host == {"kernel failed": 1}


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_verification_allows_more_where_the_host_multiplies_in_8_bits(
    kv_dtype, failures, monkeypatch
):
    for difference, agrees in ((0.02, True), (0.06, kv_dtype.itemsize == 1), (0.2, False)):
        ours = torch.ones(4, dtype=torch.bfloat16)
        theirs, out = ours - difference, ours.clone()
        group = SimpleNamespace(kv_dtype=kv_dtype, failure=FailureLatch())
        GroupAttention._cross_check(group, out, lambda out=out, theirs=theirs: out.copy_(theirs))
        assert (group.failure.reason is None) == agrees == (not failures)
        failures.clear()
        assert torch.equal(out, ours if agrees else theirs)
    monkeypatch.setattr("deft_backend.hosts.vllm.group.capturing", lambda tensor: True)
    GroupAttention._cross_check(group, out, raising(AssertionError("the host ran in a capture")))


@pytest.mark.usefixtures("policy")
def test_queries_of_eight_bits_have_a_scale():
    """Some backends of vLLM take them over a cache of 8 bits."""
    layers = tree_layers(arguments={"kv_cache_dtype": "fp8"})
    Step(Batch(DECODE, shared=2), layers, dtype=torch.uint8).check_quantised("fp8", q_scale=0.25)
    assert state().counters().steps_tree == 1


def test_a_group_takes_layers_with_its_own_kind_of_cache():
    """Bytes of another format would be read as other numbers."""
    kinds = {"auto": torch.float32, "fp8": torch.uint8, "fp8_e5m2": torch.uint8}
    for kind, dtype in kinds.items():
        layers = tree_layers(arguments={"kv_cache_dtype": kind})
        group = layers.builder(make_spec(dtype=dtype)).deft_group
        layer = layers.impls[0].deft_layer
        assert [group.takes(layer._replace(cache=name)) for name in kinds] == [
            name == kind for name in kinds
        ]
        assert group.takes(layer._replace(cache="fp8_e4m3")) == (kind == "fp8")
        assert not group.takes(layer._replace(shape=layer.shape._replace(num_query_heads=8)))
        assert not group.takes(layer._replace(reason="a window"))


def test_an_output_of_another_dtype_is_the_hosts(failures):
    step = Step(Batch(DECODE, shared=2))
    output = step.run(output=torch.zeros((len(DECODE), HEADS, DIM), dtype=torch.bfloat16))
    expected = reference(step.batch, step.cache)
    torch.testing.assert_close(output.double(), expected, rtol=0.01, atol=0.01)
    assert [("a kernel failed" in line, "bfloat16" in line) for line in failures] == [(True, True)]
    failures.clear()


def test_the_host_gets_what_vllm_passed(monkeypatch):
    """In calls that tree attention leaves to it: every argument, and the same objects."""
    calls = []
    builder_class, impl_class = PlainCpuBackend.get_builder_cls(), PlainCpuBackend.get_impl_cls()

    def record(name, result):
        return lambda self, *args, **kwargs: calls.append((name, args, kwargs)) or result

    for name in ("build", "build_for_drafting", "build_for_cudagraph_capture"):
        monkeypatch.setattr(builder_class, name, record(name, SimpleNamespace()))
    updated = record("update_block_table", SimpleNamespace())
    monkeypatch.setattr(builder_class, "update_block_table", updated, raising=False)
    monkeypatch.setattr(impl_class, "forward", record("forward", None))
    layers = tree_layers()
    builder = layers.builder(make_spec())
    common = Batch(DECODE, shared=2, query_lens=[2, 1, 1, 1, 1]).common()
    metadata = builder.build(3, common, fast_build=True)
    builder.build_for_drafting(common, draft_index=1)
    builder.build_for_cudagraph_capture(common)
    table, slots = torch.zeros(1), torch.ones(1)
    builder.update_block_table(metadata, table, slots)
    given = tuple(torch.zeros(1) for _ in range(5))
    layers.impls[0].forward(*given, metadata, slots, table, output_block_scale=slots)
    assert calls == [
        ("build", (3, common), {"fast_build": True}),
        ("build_for_drafting", (common, 1), {}),
        ("build_for_cudagraph_capture", (common,), {}),
        ("update_block_table", (metadata, table, slots), {}),
        ("forward", (*given, metadata, slots, table), {"output_block_scale": slots}),
    ]


def test_a_fused_output_quantisation_is_the_hosts(caplog):
    step = Step(Batch(DECODE, shared=2))
    scale, batch = torch.ones(1), (step.batch.query, None, None, step.cache.tensor, step.metadata)
    for impl, args, kwargs in zip(
        step.layers.impls, ((scale,), ()), ({}, {"output_scale": scale}), strict=True
    ):
        with pytest.raises(NotImplementedError, match="fused output quantisation"):
            impl.forward(None, *batch, torch.zeros((5, HEADS, DIM)), *args, **kwargs)
    assert caplog.text.count("a fused output quantisation decode through the host's kernel") == 1
    assert state().counters().steps_host == {"a fused output quantisation": 1}


@pytest.mark.parametrize("flag", [None, "enable_sleep_mode", "enable_cumem_allocator"])
def test_what_a_sleeping_server_needs_lies_outside_of_its_pools(flag, monkeypatch):
    """A pool takes all allocations of the thread that entered it, such as plan and workspace."""
    made = []
    outside = lambda make, device: made.append(make()) or made[0]  # noqa: E731
    monkeypatch.setattr(factory, "outside_memory_pools", outside)
    config = make_config()
    if flag is not None:
        setattr(config.model_config, flag, True)
    step = Step(Batch(DECODE, shared=2), tree_layers(config))
    assert made == ([] if flag is None else [step.tree.group.attention])
    step.check()
    # Another thread reads the last batch when `deft explain` asks. The host's tensors may be
    # unmapped then.
    if flag is None:
        shown = forest_of(state().batch)
        assert (shown.batch_size, shown.tokens_stored, shown.page_size) == (5, sum(DECODE) - 96, 16)
    else:
        with pytest.raises(ShownBatchError, match="may be unmapped while it is read"):
            forest_of(state().batch)
