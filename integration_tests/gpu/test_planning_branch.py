"""On a GPU: a graph that plans in a branch of its own plans each batch that it is replayed for."""

import pytest
import torch

from deft_backend.attention import TreeAttention
from deft_backend.tools.servers.driver_stub import num_gpus

pytestmark = pytest.mark.skipif(not num_gpus(), reason="these kernels run on a GPU")

REQUESTS, COLUMNS, LAYERS = 48, 1500, 3


def draw(table, lens):
    """Three levels of shared pages below a root, with pages anywhere in the cache."""
    pages = torch.randperm(REQUESTS * COLUMNS, device="cuda").int().view(REQUESTS, COLUMNS)
    end = 0
    for size in (REQUESTS, 12, 4):
        begin, end = end, end + int(torch.randint(1, 400, ()))
        for group in range(0, REQUESTS, size):
            pages[group : group + size, begin:end] = pages[group, begin:end].clone()
    table.copy_(pages)
    lens.copy_(torch.randint(end, COLUMNS + 1, lens.shape))


def expected(q, k, v, table, lens):
    rows = []
    for request, length in enumerate(lens.tolist()):
        own = table[request, :length].long()
        keys, values = (cache[own].double().repeat_interleave(4, dim=1) for cache in (k, v))
        scores = torch.einsum("hd,thd->ht", q[request].double(), keys) / 128**0.5
        rows.append(torch.einsum("ht,thd->hd", scores.softmax(1), values))
    return torch.stack(rows)


@pytest.mark.parametrize("policy", ["auto", "fasttree", "deft-flatten"])
def test_every_replay_attends_over_its_own_batch(policy):
    torch.manual_seed(0)
    attention = TreeAttention(
        num_query_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16, device="cuda",
        max_batch=REQUESTS, policy=policy,
    )  # fmt: skip
    table = torch.zeros(REQUESTS, COLUMNS, dtype=torch.int32, device="cuda")
    lens = torch.ones(REQUESTS, dtype=torch.int32, device="cuda")
    caches = torch.randn(LAYERS, 2, REQUESTS * COLUMNS, 8, 128, device="cuda").bfloat16()
    hidden = torch.randn(REQUESTS, 4096, device="cuda").bfloat16()
    weight = torch.randn(4096, 4096, device="cuda").bfloat16() / 64

    def step():
        attention.plan_on_device(table, lens, beside=True)
        q = (hidden @ weight).view(REQUESTS, 32, 128)
        return q, [attention.run(q, k, v, table, lens) for k, v in caches]

    draw(table, lens)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q, outs = step()
    for _ in range(6):
        draw(table, lens)
        hidden.normal_()
        attention.poison_workspace()
        graph.replay()
        for out, (k, v) in zip(outs, caches, strict=True):
            wanted = expected(q, k, v, table, lens)
            torch.testing.assert_close(out.double(), wanted, atol=2e-2, rtol=2e-2)


def test_a_graph_without_attention_ends_its_branch():
    attention = TreeAttention(
        num_query_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16, device="cuda",
        max_batch=REQUESTS,
    )  # fmt: skip
    table = torch.zeros(REQUESTS, COLUMNS, dtype=torch.int32, device="cuda")
    lens = torch.ones(REQUESTS, dtype=torch.int32, device="cuda")
    attention.plan_on_device(table, lens)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.plan_on_device(table, lens, beside=True)
        attention.join_planning()
    graph.replay()
    torch.cuda.synchronize()
    assert attention.device_planner.counters[0] == 2, "the capture itself makes no plan"
