"""The warm-up before the first request. Its batch sizes: see tests/compile/test_variants.py."""

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


def test_every_step_runs_a_layer_of_each_kind():
    """Over tensors of the attention's device."""
    device, ran = torch.device("meta"), []

    def run(*tensors, sinks, logit_cap, **given):
        held = (*tensors, sinks, *given.values())
        assert {each.device for each in held if isinstance(each, torch.Tensor)} == {device}
        ran.append(LayerKind(logit_cap > 0, None if sinks is None else sinks.dtype))

    size = {"num_query_heads": 4, "head_dim": 64, "max_batch": 64}
    kind = {"dtype": torch.float32, "kv_dtype": torch.float32, "interpreted": False}
    calls = {"plan_batch": lambda *batch, **given: None, "run": run}
    attention = SimpleNamespace(
        device=device, capacity=SimpleNamespace(max_batch=64), **size, **kind, **calls
    )
    cache = torch.zeros((2, 16, 2, 64), device=device)
    kinds = (LayerKind(), LayerKind(soft_cap=True), LayerKind(sinks=torch.bfloat16))
    tensors = StepTensors(cache, cache, [9], drafts=Drafts(5), layers=kinds)
    warm_up_attention(attention, tensors, smallest=1)
    assert ran == [*kinds] * 4  # batches of 1 and of 64, with and without drafts


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
