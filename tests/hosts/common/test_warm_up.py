"""The warm-up before the first request: it runs every batch size that kernels are compiled for."""

from types import SimpleNamespace

import pytest
import torch

from attention_checks import latent_attention
from deft_backend.attention import Gpu
from deft_backend.compile.variants import recorded
from deft_backend.hosts.common.warm_up import (
    Drafts,
    LayerKind,
    StepTensors,
    latent_variants,
    warm_up_attention,
)


class Recorder:
    """A stand-in for :class:`TreeAttention` that records its calls in order."""

    num_query_heads, head_dim = 4, 64
    dtype = kv_dtype = torch.float32

    def __init__(self, device, capacity, blocks=1):
        self.device = torch.device(device)
        self.interpreted = device == "cpu"
        self.capacity = SimpleNamespace(max_batch=capacity)
        self.max_batch = capacity // blocks
        self.query_tokens = 1
        self.verified = []
        self.planned = []
        self.ran = []
        self.integers = set()
        self.layers = set()

    def plan_batch(self, table, lens, *, table_rows, query_tokens=1):
        assert len(table_rows) == len(lens)
        self.query_tokens = query_tokens
        if query_tokens > 1:
            return
        self.planned.append(len(lens))
        self.integers.add((table.dtype, lens.dtype, table_rows.dtype))

    def run(self, q, k, v, table, lens, *, table_rows, out, **given):
        assert out.shape == q.shape
        held = (q, table, lens, table_rows, out, *given.values())
        assert {t.device for t in held if isinstance(t, torch.Tensor)} == {self.device}
        sinks, start, bits = map(given.get, ("sinks", "query_start", "ancestors"))
        assert sinks is None or sinks.shape == (4,)
        capped = given.get("logit_cap", 0.0) > 0
        self.layers.add(LayerKind(capped, None if sinks is None else sinks.dtype))
        assert {given.get("k_scale", 1.0), given.get("v_scale", 1.0)} == {1.0}
        tokens = self.query_tokens
        if tokens > 1:
            assert q.shape == (len(lens) * tokens, 4, 64)
            assert start is None or start.shape == (len(lens) + 1,)
            assert bits is None or bits.shape == (len(lens), tokens, 1)
            self.verified.append((len(lens), tokens, start is not None, bits is not None))
            return
        assert q.shape == (len(lens), 4, 64)
        self.ran.append(len(lens))
        self.integers.add((table.dtype, lens.dtype, table_rows.dtype))


@pytest.mark.parametrize(
    ("device", "max_batch", "smallest", "expected"),
    [
        ("meta", 32, 1, {1, 32}),  # any device but the CPU: kernels are compiled for it
        ("meta", 1024, 1, {1, 64, 256, 1024}),
        ("meta", 2048, 2, {2, 64, 256, 1024, 2048}),
        ("meta", 8, 16, {8}),
        ("meta", 2048, 80, {80, 256, 1024, 2048}),
        ("cpu", 300, 1, set()),
    ],
)
def test_the_device_planner_runs_every_size_it_is_compiled_for(
    device, max_batch, smallest, expected
):
    attention = Recorder(device, max_batch)
    cache = torch.zeros((2, 16, 2, 64), device=device)
    tensors = StepTensors(cache, cache, [9], rows_dtype=torch.int16, lens_dtype=torch.int32)
    done = warm_up_attention(attention, tensors, smallest=smallest)
    assert done is None  # nothing to compile without a GPU
    assert set(attention.planned) == expected
    assert attention.ran == attention.planned
    assert attention.integers <= {(torch.int32, torch.int32, torch.int16)}


@pytest.mark.parametrize(
    ("drafts", "blocks", "expected", "decoded"),
    [
        (Drafts(5), 1, {2, 64, 256, 300}, {2, 64, 256, 300}),
        (Drafts(5, always=True), 1, {2, 64, 256, 300}, set()),
        (Drafts(40, ragged=True, trees=True), 3, {2, 21, 85, 100}, {2, 64, 100}),
    ],
)
def test_verification_runs_every_size_that_the_planner_is_compiled_for(
    drafts, blocks, expected, decoded
):
    attention = Recorder("meta", 300, blocks)
    cache = torch.zeros((2, 16, 2, 64), device="meta")
    tensors = StepTensors(cache, cache, [9], drafts=drafts)
    warm_up_attention(attention, tensors, smallest=2)
    assert set(attention.verified) == {
        (batch, drafts.query_tokens, drafts.ragged, drafts.trees) for batch in expected
    }
    assert set(attention.planned) == decoded  # at most as many requests as a plan holds


def test_every_step_runs_a_layer_of_each_kind():
    attention = Recorder("meta", 64)
    cache = torch.zeros((2, 16, 2, 64), device="meta")
    kinds = (LayerKind(), LayerKind(soft_cap=True), LayerKind(sinks=torch.bfloat16))
    tensors = StepTensors(cache, cache, [9], drafts=Drafts(5), layers=kinds)
    warm_up_attention(attention, tensors)
    assert attention.layers == set(kinds)
    assert len(attention.verified) == 2 * len(kinds)  # batches of 1 and of 64


def latent_on(gpu, max_batch, query_tokens=1):
    """An attention whose launches can only be recorded; the host's kernel must not run."""

    def kernel(call):
        raise AssertionError("the host's kernel ran without a result to compute")

    size = {"page_size": 16, "max_batch": max_batch, "query_tokens": query_tokens}
    kinds = {"num_query_heads": 8, "dtype": torch.bfloat16, "compiled_for": Gpu.named(gpu)}
    return latent_attention(kernel=kernel, **size, **kinds)


@pytest.mark.parametrize("query_tokens", [1, 4])
@pytest.mark.parametrize("integers", [(torch.int32, torch.int32), (torch.int64, torch.int64)])
def test_every_launch_of_latent_attention_is_compiled_before_it(query_tokens, integers):
    """Of batches of all sizes that the planner's kernels are compiled for."""
    attention = latent_on("sm_90", 300, query_tokens)
    known = latent_variants(attention, integers)
    names = [variant.name for variant in known]
    assert names.count("compare_rows") == 3 + (integers[0] == torch.int64)  # one of the check
    assert names.count("gather_queries") == names.count("merge_results") == 1
    for batch in (1, 3, 64, 100, 257, 300):
        rows, lens = (torch.ones(batch, dtype=dtype) for dtype in integers)
        table = torch.zeros((2, 7), dtype=torch.int32)
        tokens = batch * query_tokens
        nope, rope = (torch.zeros(tokens, 8, dim, dtype=torch.bfloat16) for dim in (512, 64))
        transposed = nope.transpose(0, 1).contiguous().transpose(0, 1)
        with recorded() as launched:
            attention.plan_batch(table, lens, table_rows=rows, on_device=True)
            cache = torch.zeros(5, 16, 576, dtype=torch.bfloat16)
            attention.run(transposed, rope, cache, table, sm_scale=1.0)
        assert launched
        assert set(launched) <= set(known)
