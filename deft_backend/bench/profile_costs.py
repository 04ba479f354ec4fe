"""Profile partial attention on this GPU: ``python -m deft_backend.bench.profile_costs``.

Fills the table behind FlashForge's C_est(n_q, n) (section 5.2) by running stage 1 itself: one
thread block an SM, all of one shape, so that a block's time includes its share of the machine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import triton
import typer

from deft_backend import TreeAttention
from deft_backend.bench.provenance import provenance
from deft_backend.forest import build_forest
from deft_backend.planner import PlanCapacity, plan_grouping
from deft_backend.policies import GroupingBuilder, Segment
from deft_backend.policies.cost_model import CostModel, FastTreeCoefficients, default_cost_model

QUERIES = (1, 2, 4, 8, 16, 32)
TOKENS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
HEADS = (32, 8)


def block_ms(num_queries: int, tokens: int, head_dim: int, dtype: torch.dtype) -> float:
    """Median milliseconds of a launch in which every SM runs one block of this shape."""
    query_heads, kv_heads = HEADS
    sms = torch.cuda.get_device_properties("cuda").multi_processor_count
    groups = max(1, sms // kv_heads)
    batch = groups * num_queries
    builder = GroupingBuilder()
    for group in range(groups):
        queries = range(group * num_queries, (group + 1) * num_queries)
        builder.add(list(queries), [Segment(group * num_queries, 0, tokens, False, None)])
    attention = TreeAttention(
        num_query_heads=query_heads, num_kv_heads=kv_heads, head_dim=head_dim, dtype=dtype,
        device="cuda", max_batch=batch, capacity=PlanCapacity(batch, groups, batch, groups, 1),
    )  # fmt: skip
    forest = build_forest(list(range(batch)), [0] * (batch - 1), [tokens] * batch)
    plan = plan_grouping(builder.build(), forest, attention.target)
    attention.use(plan, forest)

    slots = torch.randperm(groups * tokens, device="cuda", dtype=torch.int32).view(groups, tokens)
    table = slots.repeat_interleave(num_queries, dim=0)
    lens = torch.full((batch,), tokens, dtype=torch.int32, device="cuda")
    q = torch.randn(batch, query_heads, head_dim, device="cuda").to(dtype)
    k_cache, v_cache = (
        torch.randn(groups * tokens, kv_heads, head_dim, device="cuda").to(dtype) for _ in range(2)
    )
    out = torch.empty_like(q)
    attention.run(q, k_cache, v_cache, table, lens, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.run(q, k_cache, v_cache, table, lens, out=out)
    # Many blocks of one shape run at once; the last one ends the launch.
    time: float = triton.testing.do_bench(graph.replay, warmup=10, rep=40, return_mode="median")
    return time


def main(
    out: Annotated[Path, typer.Option(help="JSON table to write.")],
    head_dim: Annotated[int, typer.Option(help="Head dimension to profile.")] = 128,
) -> None:
    """Profile partial attention over query rows and KV lengths, and write the cost table."""
    group = HEADS[0] // HEADS[1]
    # The shorter of two medians: a hiccup of the machine is no property of the kernel.
    times = np.array(
        [
            [min(block_ms(q, n, head_dim, torch.float16) for _ in range(2)) for q in QUERIES]
            for n in TOKENS
        ]
    )
    # Timer noise must not promise less time for more tokens or rows.
    times = np.maximum.accumulate(np.maximum.accumulate(times, axis=0), axis=1)
    slope = (times[1, 0] - times[0, 0]) / (TOKENS[1] - TOKENS[0])
    large = torch.empty(1 << 30, dtype=torch.int8, device="cuda")
    copy_ms = triton.testing.do_bench(lambda: large[: 1 << 29].copy_(large[1 << 29 :]))
    model = CostModel(
        source=json.dumps(provenance()),
        head_dim=head_dim,
        query_rows=np.array([float(q * group) for q in QUERIES]),
        tokens=np.array([float(n) for n in TOKENS]),
        time_ms=np.round(times, 5),
        launch_ms=round(max(0.0, float(times[0, 0] - slope * TOKENS[0])), 5),
        bandwidth_gb_s=round(2 * (1 << 29) / copy_ms / 1e6),
        fasttree=FastTreeCoefficients(**vars(default_cost_model().fasttree)),
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    model.save(out)
    typer.echo(out.read_text())


if __name__ == "__main__":
    typer.run(main)
