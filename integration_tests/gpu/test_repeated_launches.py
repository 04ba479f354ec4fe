"""On a GPU: repeated launches give the bits of full ones, and the check of all kernels passes."""

import json
import os
import subprocess
import sys
import time
from collections import Counter

import pytest
import torch

from deft_backend.attention import TreeAttention, layer_addresses
from deft_backend.attention.reference_attention import reference_attention, relative_error
from deft_backend.compile.triton_kernel import Kernel
from deft_backend.policies import POLICIES
from deft_backend.tools.servers.driver_stub import num_gpus
from integration_tests.gpu.checked_variants import report

pytestmark = pytest.mark.skipif(not num_gpus(), reason="these kernels run on a GPU")

HEADS, KV_HEADS, DIM, PAGE, LAYERS = 32, 8, 128, 16, 32


def attention_of(**given):
    heads = {"num_query_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": DIM}
    return TreeAttention(**heads, dtype=torch.bfloat16, device="cuda", page_size=PAGE, **given)


class Step:
    """A planned batch of requests that share a prefix, with the tensors of its layers."""

    def __init__(self, requests, tokens=1, kv_dtype=None, sinks=False):
        draw = torch.Generator("cuda").manual_seed(requests + tokens)
        self.attention = attention_of(kv_dtype=kv_dtype, max_batch=512, query_tokens=tokens)
        shared, own = 64, 6
        pages = shared + requests * own
        table = torch.arange(pages, dtype=torch.int32, device="cuda")
        self.table = torch.cat(
            (table[:shared].expand(requests, shared), table[shared:].view(requests, own)), 1
        ).contiguous()
        lens = torch.randint(1, PAGE * own - tokens, (requests,), generator=draw, device="cuda")
        self.lens = (lens + PAGE * shared + tokens).int()
        self.tokens, self.rows = tokens, requests * tokens
        self.caches, self.rows_of, self.options = [], [], []
        for _ in range(LAYERS):
            cache = torch.randn((pages, KV_HEADS, PAGE, 2 * DIM), generator=draw, device="cuda")
            cache = cache.to(kv_dtype or torch.bfloat16).transpose(1, 2)
            self.caches.append((cache[..., :DIM], cache[..., DIM:]))
            q = torch.randn((self.rows + 300, HEADS, DIM), generator=draw, device="cuda")
            self.rows_of.append((q.bfloat16(), torch.full_like(q, 7.0, dtype=torch.bfloat16)))
            options = {"sm_scale": DIM**-0.5}
            if kv_dtype is not None:
                for name in ("k_scale", "v_scale"):
                    options[name] = torch.rand(1, generator=draw, device="cuda") + 0.5
            if sinks:
                options["sinks"] = torch.randn(HEADS, generator=draw, device="cuda")
            self.options.append(options)
        self.addresses = [
            layer_addresses(*cache, **options)
            for cache, options in zip(self.caches, self.options, strict=True)
        ]

    def plan(self):
        self.attention.plan_batch(self.table, self.lens, query_tokens=self.tokens)

    def run(self, layer, out=None):
        q, own = self.rows_of[layer]
        out = own[: self.rows] if out is None else out
        options = self.options[layer]
        self.attention.run(
            q[: self.rows], *self.caches[layer], self.table, self.lens, out=out, **options
        )
        return out

    def repeat(self, layer):
        return self.attention.repeat(self.addresses[layer], *self.rows_of[layer])


KINDS = [
    {"requests": 37},
    {"requests": 300},
    {"requests": 20, "tokens": 4},
    {"requests": 37, "kv_dtype": torch.float8_e4m3fn},
    {"requests": 37, "sinks": True},
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_repeated_layers_have_the_bits_of_full_runs(kind):
    step = Step(**kind)
    for _ in range(2):  # the first pass compiles
        step.plan()
        step.run(0)
        repeated = [step.repeat(layer) for layer in range(1, LAYERS)]
    assert all(repeated)
    for layer in range(1, LAYERS):
        out = step.rows_of[layer][1]
        full = step.run(layer, torch.empty_like(out[: step.rows]))
        assert torch.equal(out[: step.rows], full)
        assert out[step.rows :].eq(7.0).all()
    if kind == {"requests": 37}:
        q, out = step.rows_of[-1]
        want = reference_attention(
            q[: step.rows], *step.caches[-1], step.table, step.lens, sm_scale=DIM**-0.5
        )
        assert relative_error(out[: step.rows], want) < 1e-2


@pytest.mark.parametrize("policy", [name for name, each in POLICIES.items() if each.rules])
def test_repeated_plans_have_the_bits_of_full_plans(policy, monkeypatch):
    """Eagerly and in a CUDA graph, while the lengths change."""

    def launch(kernel, *arguments, **options):
        launched[kernel] += 1
        full_launch(kernel, *arguments, **options)

    launched, full_launch = Counter(), Kernel.launch
    monkeypatch.setattr(Kernel, "launch", launch)
    repeating, full = (
        attention_of(max_batch=64, policy=policy, max_tokens=100 * PAGE) for _ in range(2)
    )
    full.device_planner._repeats = False
    table = torch.arange(48 * 100, dtype=torch.int32, device="cuda").view(48, 100)
    table[1::2, :60] = table[1, :60].clone()
    lens = torch.empty(48, dtype=torch.int32, device="cuda")

    def plan(again):
        """Plan other lengths; the launches that this took besides repeats."""
        lens.copy_(torch.randint(1000, 1600, (48,), device="cuda"))
        repeating.clear_plan(), full.clear_plan()
        full.plan_batch(table, lens)
        before = launched.total()
        again()
        assert torch.equal(repeating.arrays.arrays(), full.arrays.arrays())
        return launched.total() - before

    taken = [plan(lambda: repeating.plan_batch(table, lens)) for _ in range(6)]
    assert taken[0] > 0
    assert taken == [taken[0]] * 3 + [0] * 3  # the third is a trial, and a full plan
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        repeating.plan_batch(table, lens)
    assert plan(graph.replay) == 0
    torch.cuda.synchronize()
    assert repeating.counters[:3].tolist() == full.counters[:3].tolist()


@pytest.mark.parametrize("caches", ["empty", "full"])
def test_doctor_checks_every_case(caches, tmp_path_factory):
    folder = str(tmp_path_factory.getbasetemp() / "triton")
    command = [sys.executable, "-m", "deft_backend", "doctor", "--check", "--json"]
    environment = {**os.environ, "TRITON_CACHE_DIR": folder, "DEFT_CACHE_DIR": folder}
    began = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    content = json.loads(done.stdout)
    rows = content["check"]
    report(
        "self-check",
        f"doctor, {caches} caches",
        {"seconds": round(time.perf_counter() - began, 2), "rows": rows},
    )
    assert len(rows) == 21
    assert not [row for row in rows if row["failure"]]
    if caches == "full":
        assert not [row for row in rows if row["error"] is None]
