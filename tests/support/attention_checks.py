"""Attention of a batch against float64: plan, let it grow, run into poisoned memory, compare.

Outputs and workspaces hold NaN before: a read before a write, and a row that nobody writes, show.
"""

from typing import NamedTuple

import numpy as np
import torch

from deft_backend import TreeAttention, forest_from_page_tables
from deft_backend.attention import LatentAttention, layer_addresses
from deft_backend.attention.reference_attention import reference_attention, relative_error
from deft_backend.kernels.latent import plain_latent_attention
from deft_backend.planner import plan_grouping

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


class Batch(NamedTuple):
    """Page tables of a batch, as tensors on the CPU."""

    page_table: torch.Tensor
    seq_lens: torch.Tensor
    num_pages: int


def tree_attention(**changes):
    """Four query heads over two KV heads of dimension 64, in float32 on the CPU."""
    usual = {"num_query_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.float32}
    return TreeAttention(**{"device": "cpu", **usual, **changes})


def latent_attention(**changes):
    """Latent attention of four heads in float32 on the CPU, with a stand-in for the kernel."""
    usual = {"num_query_heads": 4, "dtype": torch.float32, "kernel": plain_latent_attention}
    return LatentAttention(**{"device": "cpu", **usual, **changes})


def check(
    batch,
    query_tokens=1,
    *,
    policy="auto",
    on_device=False,
    dtype=torch.float16,
    device="cpu",
    heads=(4, 2),
    head_dim=64,
    page_size=1,
    tree=None,
    counts=None,
    own_rows=True,
    logit_cap=0.0,
    grow=0,
    sm_scale=None,
    values=1.0,
    heads_first=False,
    kv_dtype=None,
    scales_on_device=False,
    sinks=None,
    static_launch=False,
    room=0,
    group=None,
    prepare=lambda attention: None,
):
    """Plan, let sequences grow by `grow` tokens, run, and compare the result with float64.

    `counts` are the requests' query tokens if they differ, `tree` their ancestors. `group` makes
    the grouping instead of `policy`, and `values` scales V. A cache of 8 bits has scales. Without
    `own_rows` the page table holds the requests in another order, and outputs lie in wider rows.
    The attention has `room` for more requests. `prepare` gets the attention before it plans.
    """
    query_heads, kv_heads = heads
    requests = len(batch.seq_lens)
    generator = torch.Generator().manual_seed(int(batch.seq_lens.sum()) + head_dim + query_tokens)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    q = normal(requests * query_tokens if counts is None else sum(counts), query_heads, head_dim)
    pages = (batch.num_pages, page_size, kv_heads)
    k_cache = normal(*pages, head_dim)
    v_cache = normal(*pages, head_dim)
    if heads_first:  # and gaps between pages
        wide = normal(2, batch.num_pages, kv_heads + 1, page_size, head_dim)
        k_cache, v_cache = wide[:, :, 1:].transpose(2, 3)
    v_cache *= values
    scales = {"k_scale": 1.0, "v_scale": 1.0}
    if kv_dtype is not None:
        scales = {"k_scale": 0.0125, "v_scale": 0.5}
        k_cache = (k_cache / scales["k_scale"]).clamp(-448, 448).to(kv_dtype)
        v_cache = (v_cache / scales["v_scale"]).to(kv_dtype)
    else:  # 8 bits have no NaN that kernels take as one
        position = torch.arange(batch.page_table.shape[1] * page_size)
        request, place = (position < (batch.seq_lens + grow)[:, None]).nonzero(as_tuple=True)
        nobodys = torch.ones(batch.num_pages, page_size, dtype=torch.bool)
        nobodys[batch.page_table[request, place // page_size].long(), place % page_size] = False
        k_cache[nobodys] = v_cache[nobodys] = float("nan")
    sink = None if sinks is None else 3 * torch.randn(query_heads, generator=generator)
    size = {"num_query_heads": query_heads, "num_kv_heads": kv_heads, "head_dim": head_dim}
    size |= {"page_size": page_size, "max_batch": max(1, requests) + room}
    kind = {"dtype": dtype, "kv_dtype": kv_dtype, "device": device, "query_tokens": query_tokens}
    # `deft-flatten` allows items of all tile shapes.
    attention = tree_attention(**size, **kind, policy=policy if group is None else "deft-flatten")
    prepare(attention)
    table = batch.page_table.to(device)
    lens = (batch.seq_lens + grow).to(device)
    rows, held = None, table
    if not own_rows:
        rows = torch.randperm(requests, generator=generator).to(device)
        held = torch.empty_like(table)
        held[rows] = table
    attention.poison_workspace()
    if on_device:
        attention.plan_batch(held, lens, table_rows=rows, query_tokens=query_tokens, on_device=True)
    else:
        forest = forest_from_page_tables(batch.page_table, batch.seq_lens, page_size)
        if group is None:
            attention.plan(forest, query_tokens=query_tokens)
        else:
            target = attention._shapes[query_tokens].target
            plan = plan_grouping(group(forest, target), forest, target)
            attention.use(plan, forest, query_tokens=query_tokens)
    given = {
        "logit_cap": logit_cap,
        "sm_scale": sm_scale,
        "ancestors": None if tree is None else tree.to(device),
        "sinks": None if sink is None or sinks is None else sink.to(device, sinks),
    }
    if counts is not None:
        starts = [0, *np.cumsum(counts).tolist()]
        given["query_start"] = torch.tensor(starts, dtype=torch.int32, device=device)
    wide = q.new_full((len(q), query_heads + 2, head_dim + 8), float("nan"))
    out = torch.full_like(q, float("nan")) if own_rows else wide[:, :query_heads, :head_dim]
    on_gpu = {name: torch.tensor([scale], device=device) for name, scale in scales.items()}
    options = {"table_rows": rows, "out": out, "static_launch": static_launch, **given}
    options |= on_gpu if scales_on_device else scales
    attention.run(q, k_cache, v_cache, held, lens, **options)
    expected = reference_attention(q, k_cache, v_cache, table, lens, **given, **scales)
    assert out.isfinite().all()
    assert own_rows or wide.isfinite().sum() == out.numel()
    assert relative_error(out, expected) <= TOLERANCE[dtype]
    return attention


def repeated_layers(monkeypatch, module):
    """Let an adapter's layers be repeated, as on a GPU; each takes a full run here.

    `module` of the adapter asks for the layers' addresses. Returns the rows of each repeat.
    """
    found, full, last = [], TreeAttention.run, {}

    def run(self, q, k_cache, v_cache, *batch, **options):
        of_step = {name: options.get(name) for name in ("query_start", "table_rows", "ancestors")}
        last.update(plan=self.batch, batch=batch, options=of_step, rows=len(q))
        return full(self, q, k_cache, v_cache, *batch, **options)

    def repeat(self, layer, q, out):
        if last.get("plan") is not self.batch:
            return False
        k_cache, v_cache, options = layer.layout
        found.append(len(q))
        rows = slice(last["rows"])
        given = {**last["options"], **options, "out": out[rows]}
        full(self, q[rows], k_cache, v_cache, *last["batch"], **given)
        return True

    monkeypatch.setattr(TreeAttention, "run", run)
    monkeypatch.setattr(TreeAttention, "repeat", repeat)
    monkeypatch.setattr(
        module,
        "layer_addresses",
        lambda k, v, **options: layer_addresses(k, v, **options)._replace(layout=(k, v, options)),
    )
    return found
