"""vLLM's graphs of whole steps that hold both attentions: FLASH_ATTN's, in the mode FULL."""

import random
from types import SimpleNamespace

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import ModelCudaGraphManager

import vllm_fakes as fakes
from deft_backend.attention import TreeAttention
from deft_backend.hosts.vllm import builder, group
from deft_backend.hosts.vllm.cached_prefixes import CachedPrefixes
from deft_backend.hosts.vllm.step import step_of
from deft_backend.hosts.vllm.versions import VLLM
from deft_patches.vllm import left_graphs
from failure_lines import raising
from vllm_cpu_backend import PlainCpuBuilder

REQUESTS, TOKENS = 6, 24


class Graph:
    """A graph of REQUESTS requests and TOKENS tokens: it is captured with a token a request."""

    def __init__(self, before_capture=lambda layers: None):
        self.layers = fakes.tree_layers()
        self.builder = self.layers.builder(fakes.make_spec())
        before_capture(self.layers)
        self.captured = self.build(fakes.Batch([1] * REQUESTS, shared=0), capture=True)

    def build(self, batch, *, capture=False, **changes):
        """Metadata of a batch, padded to the graph's sizes."""
        common = batch.common(num_actual_tokens=TOKENS, **changes)
        if not capture:
            return self.builder.build(0, common)
        metadata = self.builder.build_for_cudagraph_capture(common)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(group, "capturing", lambda tensor: True)
            self.run(batch, metadata)
        return metadata

    def run(self, batch, metadata):
        """The results of each layer over the batch's tokens."""
        cache, spare = fakes.Cache(batch.pages, batch.block_size), TOKENS - len(batch.query)
        outputs = [fakes.run(impl, batch, cache, metadata, spare) for impl in self.layers.impls]
        return cache, [output[: len(batch.query)] for output in outputs]

    def check(self, batch, metadata):
        cache, outputs = self.run(batch, metadata)
        for output in outputs:
            fakes.close(output, fakes.reference(batch, cache))

    def checked(self):
        """Metadata of MIXED, whose results are right."""
        batch = padded(*MIXED)
        metadata = self.build(batch)
        self.check(batch, metadata)
        return metadata


MIXED = [40, 37, 33, 50, 5], [1, 1, 1, 12, 5]


def padded(lens, queries, **changes):
    """Requests of these lengths that share two blocks, and padding behind them."""
    more = [0] * (REQUESTS - len(lens))
    return fakes.Batch([*lens, *more], shared=2, query_lens=[*queries, *more], **changes)


def sharing(monkeypatch):
    """The CPU's backend takes part as FLASH_ATTN would."""
    monkeypatch.setattr(builder, "may_share_graphs", lambda host, config: True)
    monkeypatch.setattr(PlainCpuBuilder, "aot_schedule", True, raising=False)
    monkeypatch.setattr(builder, "TRIED_HEAD_DIMS", (fakes.DIM,))


@pytest.fixture
def graph(monkeypatch):
    sharing(monkeypatch)
    return Graph()


@pytest.mark.parametrize("seed", range(8))
def test_one_graph_serves_every_batch_of_its_size(seed, graph, monkeypatch):
    """Decode alone, with prompts of any length, prompts alone, and decode behind a prompt."""
    draw, takes_one = random.Random(seed), seed % 2  # where the host's kernel would split no KV
    monkeypatch.setattr(builder, "SPLIT_REQUESTS", REQUESTS - takes_one)
    for decoding in (draw.randint(1, REQUESTS), draw.randint(1, 3), 1, 0):
        prompts = draw.randint(decoding == 0, min(2, REQUESTS - decoding))
        lens = [draw.randint(34, 70) for _ in range(decoding + prompts)]
        queries = [1] * decoding + [draw.randint(2, 8) for _ in range(prompts)]
        if seed % 4 == 3 and decoding + prompts > 1:
            queries = queries[::-1]
        metadata = graph.build(batch := padded(lens, queries))
        step, captured = step_of(metadata), step_of(graph.captured)
        starts = metadata.query_start_loc, graph.captured.query_start_loc
        for ours, theirs in ((step.seq_lens, captured.seq_lens), starts):
            assert ours.data_ptr() == theirs.data_ptr()
            assert ours.shape == theirs.shape
        front = next((at for at, tokens in enumerate(queries) if tokens > 1), len(queries))
        front = front if front > 1 or takes_one else 0  # DEFT_MIN_BATCH counts what decodes
        assert step.seq_lens.tolist() == [*lens[:front], *[0] * (REQUESTS - front)]
        of_host = [*[0] * front, *queries[front:], *[0] * (REQUESTS - len(queries))]
        assert metadata.query_start_loc.diff().tolist() == of_host
        graph.check(batch, metadata)
    assert graph.builder.deft_group.attention.skips_empty
    # Its launches are in graphs, and are no trial of repeated ones: a capture's lengths are 0.
    assert not any(hasattr(impl, "deft_held") for impl in graph.layers.impls)


def test_steps_count_by_what_decodes(graph):
    lens, queries = MIXED
    prefilling = torch.tensor([False] * 3 + [True] * 2)  # without the requests of padding
    graph.build(padded(lens, queries), is_prefilling=prefilling)
    graph.build(padded(lens[:3], [1, 1, 1]), is_prefilling=torch.tensor([False, False, True]))
    graph.build(padded([9, 40], [5, 1]), is_prefilling=torch.tensor([True, False]))
    counters = fakes.state().counters()
    assert [counters.total(kind, tree=True).steps for kind in ("mixed", "decode")] == [1, 1]
    assert counters.total("decode", tree=True).rows == 2
    (left,) = [of.reason for of in counters.steps if of.reason]
    assert left == "decode rows behind prefills"
    graph.build(padded([9], [5]), is_prefilling=torch.tensor([True]))
    assert fakes.state().counters().steps == counters.steps


def test_a_kernel_that_fails_loses_no_row(graph, monkeypatch, failures):
    """Neither the eager step in which it fails nor a later one: graphs keep their division."""
    batch = padded(*MIXED)
    metadata = graph.build(batch)
    monkeypatch.setattr(TreeAttention, "run", raising(RuntimeError("no kernel")))
    graph.check(batch, metadata)
    assert graph.builder.deft_group.failure.reason
    assert fakes.state().counters().total("mixed", tree=False).steps == 1
    failures.clear()


def test_a_graph_without_tree_attention_leaves_all_rows(monkeypatch, failures):
    """A kernel fails in the capture: the host's part of the graph computes every row."""
    sharing(monkeypatch)
    monkeypatch.setattr(TreeAttention, "run", raising(RuntimeError("no kernel")))
    graph = Graph()
    metadata = graph.checked()
    assert metadata.query_start_loc.data_ptr() == graph.captured.query_start_loc.data_ptr()
    assert step_of(metadata).seq_lens.sum() == 0
    failures.clear()


def test_a_layer_that_leaves_in_a_capture_takes_the_graph_with_it(monkeypatch):
    """Otherwise no kernel would compute the rows of tree attention in this layer."""

    def leave(layers):
        first = layers.impls[0]
        first.deft_layer = first.deft_layer._replace(reason="a scale for each token")

    sharing(monkeypatch)
    assert step_of(Graph(leave).checked()).seq_lens.sum() == 0


def test_a_graph_of_too_few_requests_is_the_hosts(monkeypatch):
    sharing(monkeypatch)
    monkeypatch.setenv("DEFT_MIN_BATCH", str(REQUESTS + 1))
    graph = Graph()
    assert step_of(graph.captured) is step_of(graph.checked()) is None
    assert fakes.state().counters().total("mixed", tree=False).steps == 1


@pytest.mark.parametrize("least", [2, REQUESTS + 1])
def test_the_hosts_schedule_is_that_of_the_captured_kernel(least, monkeypatch):
    """Of one prompt of all tokens, whatever the batch holds, and whether trees take part.

    FLASH_ATTN splits KV alike up to ``max_cudagraph_size``: without a graph, as in vLLM alone.
    """
    found, build = [], PlainCpuBuilder.build

    def seen(self, common_prefix_len, common, **options):
        found.append((common.max_query_len, self.max_cudagraph_size))
        return build(self, common_prefix_len, common, **options)

    monkeypatch.setattr(PlainCpuBuilder, "build", seen)
    monkeypatch.setenv("DEFT_MIN_BATCH", str(least))
    sharing(monkeypatch)
    graph = Graph()
    for queries in ([1, 1, 1], [1, 1, 12]):
        graph.build(padded([40, 37, 33], queries))
    assert found == [(TOKENS, TOKENS)] * 3
    graph.builder.build(0, fakes.Batch([40, 37], shared=2).common())
    assert found[3:] == [(1, 0)]  # no size is among vLLM's own


def test_other_sizes_and_models_have_graphs_of_their_own(graph, monkeypatch):
    batch = fakes.Batch([40, 37], shared=2)
    assert step_of(graph.builder.build(0, batch.common())).whole is None
    batch = padded(*MIXED)
    cascade = graph.builder.build(16, batch.common(num_actual_tokens=TOKENS))
    assert step_of(cascade) is None
    build = PlainCpuBuilder.build

    def causal_only(self, common_prefix_len, common, **options):
        return build(self, common_prefix_len, common.replace(causal=True), **options)

    monkeypatch.setattr(PlainCpuBuilder, "build", causal_only)
    assert step_of(graph.build(batch, causal=False)).seq_lens.sum() == 0
    with monkeypatch.context() as patch:
        patch.setenv("DEFT_MAX_BATCH", "15")  # of 16 requests in the server
        assert fakes.tree_layers().builder(fakes.make_spec()).deft_batches is None
    reasons = (PlainCpuBuilder, "aot_schedule", False), (builder, "TRIED_HEAD_DIMS", (128,))
    for owner, name, value in reasons:
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert fakes.tree_layers().builder(fakes.make_spec()).deft_batches is None
    eight_bits = fakes.tree_layers(arguments={"kv_cache_dtype": "fp8"})
    spec = fakes.make_spec(dtype=torch.uint8)
    assert eight_bits.builder(spec).deft_group is not None
    assert eight_bits.builder(spec).deft_batches is None
    config = fakes.make_config()
    layers = [fakes.tree_layers(config, prefix=each) for each in ("one", "other")]
    assert layers[0].builder(fakes.make_spec()).deft_batches is None
    assert "cudagraph_mode" not in vars(config.compilation_config)
    assert graph.layers.config.compilation_config.cudagraph_mode == CUDAGraphMode.FULL


USUAL = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]  # vLLM 0.33, max_num_seqs >= 256


def asking(monkeypatch, sizes):
    """Layers, and their builder, of a server whose graphs have these sizes."""
    sharing(monkeypatch)
    layers = fakes.tree_layers()
    layers.config.scheduler_config.max_num_batched_tokens = 800
    graphs = layers.config.compilation_config
    graphs.cudagraph_capture_sizes, graphs.max_cudagraph_capture_size = sizes, sizes[-1]
    return layers, layers.builder(fakes.make_spec())


@pytest.mark.parametrize(("sizes", "largest"), [(USUAL, 800), (USUAL[:-1], 496), ([8], 8)])
def test_larger_graphs_follow_those_that_vllm_chose(sizes, largest, monkeypatch):
    layers, built = asking(monkeypatch, sizes)
    graphs = layers.config.compilation_config
    assert graphs.max_cudagraph_capture_size == graphs.cudagraph_capture_sizes[-1] == largest
    again = layers.builder(fakes.make_spec())  # the host makes builders twice
    assert built.max_cudagraph_size == again.max_cudagraph_size == sizes[-1]


@pytest.mark.parametrize("own", [False, True])  # sizes that the user chose
@pytest.mark.parametrize(
    ("tokens", "uniform", "shared", "left"),
    [(513, None, 0, True), (512, None, 0, False), (513, 1, 0, False), (513, None, 10**6, False)],
)
def test_large_steps_that_share_nothing_have_no_graph(
    tokens, uniform, shared, left, own, monkeypatch
):
    """Steps with prefills, as in vLLM alone; steps that decode alone keep their graphs."""
    monkeypatch.setattr(left_graphs, "rules", {})
    monkeypatch.setattr(CachedPrefixes, "shared_tokens", shared)
    monkeypatch.setattr(ModelCudaGraphManager, "dispatch", lambda self, *sizes, **more: sizes)
    layers, built = asking(monkeypatch, [*USUAL, 600] if own else USUAL)
    built.deft_group.costs = SimpleNamespace(transfer_ms=float)
    for config in (fakes.make_config(), layers.config):
        manager = object.__new__(ModelCudaGraphManager)
        manager.vllm_config = config
        found = manager.dispatch(3, tokens, uniform, num_active_loras=0)
        leaves = left and not own and config is layers.config
        if leaves:
            assert (found.cg_mode, found.num_tokens) == (CUDAGraphMode.NONE, tokens)
        else:
            assert found == (3, tokens, uniform)
        assert built.deft_batches.left == leaves
    manager.dispatch(3, 8, None)
    assert not built.deft_batches.left
    fakes.tree_layers().builder(fakes.make_spec())  # of another server
    assert not left_graphs.rules


def test_a_step_that_left_its_graph_is_built_as_without(graph):
    """Its requests and tokens may be those of a captured graph. The step behind it has its graph
    again, also if no rule heard of that step: a second engine in the process removes the rules.
    """
    batch = fakes.Batch([40, 37, 33, 50, 35, 60], shared=2, query_lens=[1] * 5 + [TOKENS - 5])
    graph.builder.deft_batches.left = True
    metadata = graph.builder.build(0, batch.common())
    assert step_of(metadata) is None
    graph.check(batch, metadata)
    assert step_of(graph.build(batch)).whole is not None


def test_graphs_of_all_steps_are_asked_of_servers_that_were_tried(monkeypatch):
    host = SimpleNamespace(get_name=lambda: "FLASH_ATTN")
    config = fakes.make_config()
    model, parallel = vars(config.model_config), vars(config.parallel_config)
    model |= {"is_multimodal_model": False, "enable_prompt_embeds": False}
    config.cache_config.kv_sharing_fast_prefill = False
    config.use_v2_model_runner, config.lora_config, config.kv_transfer_config = True, None, None
    config.compilation_config.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    monkeypatch.setattr(type(VLLM), "installed", lambda self: "0.33.0")
    assert builder.may_share_graphs(host, config)
    assert not builder.may_share_graphs(SimpleNamespace(get_name=lambda: "TRITON_ATTN"), config)
    for name, value in (
        ("use_v2_model_runner", False),
        ("speculative_config", object()),
        ("lora_config", object()),
        ("kv_transfer_config", object()),
        ("model_config", SimpleNamespace(**{**model, "is_multimodal_model": True})),
        ("model_config", SimpleNamespace(**{**model, "enable_prompt_embeds": True})),
        ("parallel_config", SimpleNamespace(**{**parallel, "pipeline_parallel_size": 2})),
        ("parallel_config", SimpleNamespace(**{**parallel, "data_parallel_size": 2})),
        ("parallel_config", SimpleNamespace(**{**parallel, "tensor_parallel_size": 2})),
        ("cache_config", SimpleNamespace(kv_sharing_fast_prefill=True)),
        ("compilation_config", SimpleNamespace(cudagraph_mode=CUDAGraphMode.PIECEWISE)),
    ):
        changed = SimpleNamespace(**{**vars(config), name: value})
        assert not builder.may_share_graphs(host, changed), name
    for setting in ("VLLM_BATCH_INVARIANT", "DEFT_VERIFY"):
        with monkeypatch.context() as patch:
            patch.setenv(setting, "1")
            assert not builder.may_share_graphs(host, config)
    monkeypatch.setattr(type(VLLM), "installed", lambda self: "0.32.0")
    assert not builder.may_share_graphs(host, config)
