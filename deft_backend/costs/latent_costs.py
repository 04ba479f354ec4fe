"""Costs of MLA by the host's kernel: what an item, a token and a partial result take.

The times are those of the whole GPU, for FlashAttention-3 in bfloat16 on an H100
(docs/results/mla-h100.json). A tile takes the same time for any number of query vectors, so both
tile shapes have the same costs. `LatentAttention.loses` decides with them.
"""

from __future__ import annotations

from dataclasses import replace

from deft_backend.costs.cost_model import CostModel, TileCosts, default_cost_model

TOKEN_NS = 0.19  # a tile reads and computes one KV token

ITEM_NS = 20.0  # a tile begins and ends

HEAD_NS = 2.0  # one head's partial result of a query is written, read and merged

LAUNCH_NS = 14000.0  # the launches that gather queries and merge results, in each layer

LEAVES_NS = (
    33000.0  # a second call for leaves, in each layer, if a request has several query tokens
)

STEP_NS = 700_000.0
"""What a server's step takes longer over a plan, apart from its layers. The first end-to-end run
(docs/results/e2e-sglang-mla-h200.json) bounds it: with 8 layers, kernels that save 0.5 ms a step
made the server slower, and kernels that save 1.1 ms made it faster."""

MARGIN = 1.2  # a plan must save so many times its costs, which may be wrong by a fifth


def latent_costs(num_query_heads: int) -> CostModel:
    """The cost model of the host's MLA kernel for so many heads of a rank."""
    tiles = TileCosts(
        (ITEM_NS, ITEM_NS), (TOKEN_NS, TOKEN_NS), HEAD_NS * num_query_heads, LAUNCH_NS
    )
    return replace(default_cost_model(), source="FlashAttention-3, MLA", tiles=tiles)
