"""What an attention plans for, on GPUs that are not at hand and in the interpreter."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from attention_checks import latent_attention, tree_attention
from deft_backend import forest_from_page_tables
from deft_backend.attention import Gpu, layer_addresses
from deft_backend.compile.triton_kernel import Kernel
from deft_backend.forest import build_forest
from deft_backend.kernels.latent import LatentStep, plain_latent_attention
from deft_backend.policies import get_policy
from drawings import check_asked


def test_the_target_of_plans():
    """Eight KV heads share the programs. The interpreter plans as if it had the Hopper kernels."""

    def answer(gpu, kv_dtype, query_tokens):
        kind = {"num_query_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": torch.bfloat16}
        kind |= {"kv_dtype": getattr(torch, kv_dtype), "query_tokens": int(query_tokens)}
        if gpu == "latent":
            latent = latent_attention(query_tokens=int(query_tokens), max_batch=4)
            return [str(replace(latent.target, cost_model=None))]
        described = None if gpu == "cpu" else Gpu.named(gpu)
        attention = tree_attention(**kind, max_batch=4, compiled_for=described)
        return [str(replace(attention._shapes[int(query_tokens)].target, cost_model=None))]

    check_asked(Path(__file__).with_name("targets.txt"), answer)


def test_a_batchs_own_rows_are_on_the_attentions_device():
    assert latent_attention(device="meta", max_batch=4)._own_rows.device.type == "meta"


def test_a_step_in_the_interpreter_is_not_repeated():
    attention = tree_attention(max_batch=2)
    table, lens = torch.arange(6).view(2, 3).int(), torch.tensor([3, 2])
    q, caches = torch.randn(2, 4, 64), torch.randn(2, 6, 2, 64)
    attention.plan(forest_from_page_tables(table, lens))
    out = attention.run(q, *caches, table, lens)
    assert not attention.repeat(layer_addresses(*caches, sm_scale=0.125), q, out)


@pytest.mark.parametrize(
    ("heads", "tokens", "requests", "splits"),
    [(16, 1, 4, 128), (16, 1, 16, 66), (16, 1, 256, 8), (16, 2, 8, 66), (32, 1, 8, 66)],
)
def test_calls_of_latent_attention(heads, tokens, requests, splits):
    """Parts of KV ranges fill 132 SMs twice, if all requests share a node; 8 to 128 of them.

    A tile of the host's kernel holds 64 query vectors.
    """
    calls = []

    def kernel(call):
        calls.append(call)
        return plain_latent_attention(call)

    kind = {"num_query_heads": heads, "query_tokens": tokens, "value_dim": 64, "rope_dim": 16}
    attention = latent_attention(kernel=kernel, max_batch=requests, **kind)
    attention._launches._sms = 132
    table = torch.arange(requests * 3).view(requests, 3).int()
    attention.plan_batch(table, torch.full((requests,), 3))
    q = torch.randn(requests * tokens, heads, 80)
    cache = torch.randn(requests * 3, 80)
    attention.run(q[..., :64], q[..., 64:], cache, table, sm_scale=0.1)
    assert [call.most_splits for call in calls] == [splits] * (1 + (tokens > 1))
    assert [call.causal for call in calls] == [False, True][: len(calls)]
    assert [call.max_query_tokens for call in calls] == [requests * tokens, tokens][: len(calls)]
    nodes = max(4, requests // 4)
    assert [len(call.batch[1]) for call in calls] == [requests + nodes, requests][: len(calls)]
    assert len(calls[0].q_nope) == 4 * requests * tokens


@pytest.mark.parametrize(
    ("shared", "fits"),
    [
        ([200, 100, 200, 100, 200, 100, 200], False),  # five nodes of eight requests
        ([200, 100, 200, 100, 200, 100, 100], True),
        ([100, 200, 300, *[400] * 12], False),  # 58 entries of nodes of 16 requests
        ([100, 200, *[300] * 13], True),
    ],
)
def test_a_tree_beyond_the_room_of_a_call_is_computed_request_by_request(shared, fits):
    """Room for four nodes at least, and for four entries of each request."""
    forest = build_forest(range(len(shared) + 1), shared, [410] * (len(shared) + 1))
    plan = latent_attention(max_batch=64).plan(forest, policy=get_policy("deft-node"))
    assert (np.diff(plan.item_query_ptr).max() > 1) == fits


@pytest.mark.parametrize("name", [None, "lens", "rows", "q_nope", "q_rope", "out"])
def test_each_address_alone_decides_whether_launches_are_aligned(name, monkeypatch):
    found = []
    attention = latent_attention(max_batch=4, value_dim=64, rope_dim=16)
    sizes = {"lens": (4,), "rows": (4,), "q_nope": (4, 4, 64), "q_rope": (4, 4, 16)}
    sizes["out"] = sizes["q_nope"]
    given = {}
    for each, size in sizes.items():
        dtype = torch.int32 if each in ("lens", "rows") else torch.float32
        held = torch.ones(torch.Size(size).numel() + 4, dtype=dtype)
        given[each] = held[int(each == name) :][: torch.Size(size).numel()].view(size)
    lens, rows = given.pop("lens"), given.pop("rows")
    monkeypatch.setattr(Kernel, "launch", lambda *_, aligned, **__: found.append(aligned))
    attention._launches.lay_out(attention._room(4), lens, rows, 1)
    step = LatentStep(
        *(given[n] for n in ("q_nope", "q_rope")),
        torch.ones(4, 1, 1, 80),
        torch.zeros(4, 1).int(),
        given["out"],
        0.1,
    )
    attention._launches.run(
        step, attention._room(4), 1, lambda call: (given["out"], lens.float()[None])
    )
    layout, results = name not in ("lens", "rows"), name in (None, "lens", "rows")
    assert found == [layout, results, results]
