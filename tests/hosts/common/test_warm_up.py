"""The warm-up before the first request. Its batch sizes: see tests/compile/test_variants.py."""

from types import SimpleNamespace

import pytest
import torch

from attention_checks import latent_attention, tree_attention
from deft_backend.attention import Gpu
from deft_backend.attention import tree_attention as module
from deft_backend.compile.variants import recorded
from deft_backend.hosts.common import warm_up
from deft_backend.hosts.common.warm_up import (
    Drafts,
    LayerKind,
    StepTensors,
    failed_self_check,
    latent_variants,
    warm_up_attention,
)
from failure_lines import raising

DTYPES = (torch.int16, torch.int64)
"""Of page tables, lengths and rows: three different ones."""


KINDS = (LayerKind(), LayerKind(soft_cap=True), LayerKind(sinks=torch.bfloat16))


@pytest.mark.parametrize("smallest", [3, 400])
@pytest.mark.parametrize(
    "drafts", [None, Drafts(5), Drafts(5, ragged=True), Drafts(5, trees=True, always=True)]
)
@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.float8_e4m3fn])
def test_the_steps_that_launch_every_kernel(drafts, kv_dtype, smallest):
    """The largest batch first, then one for each size of the planner's kernels; a layer of each
    kind in each. A plan holds two query blocks of each request.
    """
    steps = []

    def plan_batch(table, lens, *, table_rows, query_tokens=1):
        assert (table.dtype, lens.dtype, table_rows.dtype) == (*DTYPES, DTYPES[1])
        assert not table.any()
        assert not table_rows.any()
        assert len(table_rows) == len(lens)
        assert set(lens.tolist()) == {query_tokens + 1}
        steps.append((len(lens), table.shape[1], query_tokens, []))

    def run(q, k_cache, v_cache, table, lens, *, out, logit_cap, sinks, **given):
        batch, _, tokens, layers = steps[-1]
        assert k_cache is v_cache is cache
        assert q.shape == out.shape == (batch * tokens, 4, 64)
        assert q.dtype == out.dtype == torch.float16
        starts, bits = given.pop("query_start", None), given.pop("ancestors", None)
        assert (starts is not None) == bool(drafts and drafts.ragged and tokens > 1)
        assert starts is None or starts.tolist() == [tokens * at for at in range(batch + 1)]
        assert (bits is not None) == bool(drafts and drafts.trees and tokens > 1)
        assert bits is None or (bits.shape, bits.any()) == ((batch, tokens, 1), False)
        scale = 1.0 if kv_dtype == torch.float16 else "on the device"
        assert given.pop("k_scale") == given.pop("v_scale") == scale
        assert [*given] == ["table_rows"]
        assert sinks is None or sinks.shape == (4,)
        layers.append(LayerKind(logit_cap > 0, None if sinks is None else sinks.dtype))

    size = {"num_query_heads": 4, "head_dim": 64, "max_batch": 300, "unit_scale": "on the device"}
    kind = {"dtype": torch.float16, "kv_dtype": kv_dtype, "interpreted": False}
    calls = {"plan_batch": plan_batch, "run": run, "device": torch.device("cpu")}
    attention = SimpleNamespace(capacity=SimpleNamespace(max_batch=600), **size, **kind, **calls)
    cache, columns = torch.zeros(2, 16, 2, 64), (4, 9)
    names = ("table_dtype", "integers")
    given = dict(zip(names, DTYPES, strict=True))
    tensors = StepTensors(cache, cache, columns, drafts=drafts, layers=KINDS, **given)
    warm_up_attention(attention, tensors, smallest=smallest)
    expected = []
    for wide in columns:
        if drafts is not None:
            batches = (300, 128, 32, 3) if smallest == 3 else (300,)
            expected += [(batch, max(6, wide), 5, [*KINDS]) for batch in batches]
        if drafts is None or not drafts.always:
            batches = (300, 256, 64, 3) if smallest == 3 else (300,)
            expected += [(batch, wide, 1, [*KINDS]) for batch in batches]
    assert steps == expected


@pytest.mark.parametrize(
    ("device", "interpreted", "expected"),
    [
        ("cuda", False, ["variants from 3", "compile", "run from 3", "synchronize"]),
        ("cuda", True, []),
        ("cpu", False, ["run from 3"]),
    ],
)
def test_kernels_are_compiled_before_they_run(device, interpreted, expected, monkeypatch):
    calls = []

    def step_variants(attention, tensors, *, smallest):
        calls.append(f"variants from {smallest}")
        return "variants"

    def compiled(*given):
        assert given == ("variants", attention.device, "shared")
        calls.append("compile")

    monkeypatch.setattr(warm_up, "step_variants", step_variants)
    monkeypatch.setattr(warm_up, "compile_for_server", compiled)
    monkeypatch.setattr(warm_up, "_run_steps", lambda *given: calls.append(f"run from {given[2]}"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda at: calls.append("synchronize"))
    attention = SimpleNamespace(device=torch.device(device), interpreted=interpreted)
    warm_up_attention(attention, None, smallest=3, shared="shared")
    assert calls == expected


@pytest.mark.parametrize("query_tokens", [1, 4])
@pytest.mark.parametrize("integers", [torch.int32, torch.int64])
def test_every_launch_of_latent_attention_is_compiled_before_it(query_tokens, integers):
    """Of batches of all sizes that the planner's kernels are compiled for."""
    refused = raising(AssertionError("the host's kernel ran without a result to compute"))
    size = {"page_size": 16, "max_batch": 300, "query_tokens": query_tokens}
    kinds = {"num_query_heads": 8, "dtype": torch.bfloat16, "compiled_for": Gpu.named("sm_90")}
    attention = latent_attention(kernel=refused, **size, **kinds)
    known = latent_variants(attention, integers)
    names = [variant.name for variant in known]
    assert names.count("compare_rows") == 3 + (integers == torch.int64)  # one of the check
    assert names.count("gather_queries") == names.count("merge_results") == 1
    for batch in (1, 3, 64, 100, 257, 300):
        rows, lens = (torch.ones(batch, dtype=integers) for _ in range(2))
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


def test_variants_are_compiled_and_loaded_on_the_servers_gpu(monkeypatch, caplog):
    caplog.set_level("INFO", logger="deft_backend")
    asked, devices, gpu = [], [], torch.device("cuda", 3)
    compiled = lambda *given, **named: asked.append((given, named)) or "2 kernels"  # noqa: E731
    monkeypatch.setattr(warm_up, "compile_all", compiled)
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    warm_up.compile_for_server(["a", "b"], gpu, "shared")
    ((given, named),) = asked
    named.pop("prepare")()
    assert (given, named, devices) == ((["a", "b"],), {"load": True, "shared": "shared"}, [gpu])
    assert caplog.messages == ["deft: 2 kernels"]


# Without recorded results, a server checks its kernels or leaves all to the host


@pytest.fixture
def attention():
    return tree_attention(dtype=torch.float16, page_size=16, max_batch=4, query_tokens=3)


def tensors_of(drafts=None):
    k_cache, v_cache = torch.zeros(3, 2, 16, 2, 64, dtype=torch.float16).unbind(1)
    return StepTensors(k_cache, v_cache, [64], drafts=drafts, layers=[LayerKind(soft_cap=True)])


def ran(monkeypatch, fault=False):
    """The rows, the soft cap and whether there is a token tree, of each run that follows."""
    found = []
    run_plan = module.run_plan

    def spy(config, plan, step, *rest, **named):
        found.append((len(step.q), step.logit_cap, step.ancestors is not None))
        run_plan(config, plan, step, *rest, **named)
        if fault:
            step.out[0] = -step.out[0]

    monkeypatch.setattr(module, "run_plan", spy)
    return found


@pytest.mark.parametrize(
    ("drafts", "kinds"),
    [
        (None, [(4, False)]),
        (Drafts(3, ragged=True), [(4, False), (12, False)]),
        (Drafts(3, trees=True, always=True), [(12, True)]),
    ],
)
def test_an_unknown_gpu_checks_each_kind_of_step(drafts, kinds, attention, monkeypatch, caplog):
    monkeypatch.setattr(warm_up, "gpu_name", lambda device: "NVIDIA L40S")
    monkeypatch.setattr(warm_up, "CHECK_SECONDS", 600.0)
    runs = ran(monkeypatch)
    caplog.set_level("INFO", "deft_backend")
    assert failed_self_check(attention, tensors_of(drafts)) is None
    assert runs == [(rows, 20.0, trees) for rows, trees in kinds]
    # A server of an earlier test may still report from its thread.
    (line,) = [said for said in caplog.messages if "recorded results" in said]
    assert "NVIDIA L40S has no recorded results; its kernels passed a check" in line


def test_a_wrong_row_keeps_the_kernels_from_decoding(attention, monkeypatch):
    monkeypatch.setattr(warm_up, "gpu_name", lambda device: "NVIDIA A100-SXM4-80GB")
    ran(monkeypatch, fault=True)
    reason = failed_self_check(attention, tensors_of())
    assert "NVIDIA A100-SXM4-80GB has no recorded results" in reason
    assert "decode, soft cap, planned on the device: row 0 is off by 2 " in reason


@pytest.mark.parametrize("gpu", [None, "NVIDIA H100 80GB HBM3"])
def test_the_cpu_and_recorded_gpus_check_nothing(gpu, attention, monkeypatch):
    monkeypatch.setattr(warm_up, "gpu_name", lambda device: gpu)
    monkeypatch.setattr(warm_up, "unrecorded", lambda name: None)
    runs = ran(monkeypatch, fault=True)
    assert failed_self_check(attention, tensors_of()) is None
    assert runs == []
