"""Count the reads and writes of a grouping, as DeFT counts them and as our kernels issue them."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deft_backend.forest import PrefixForest
from deft_backend.planner import plan_grouping
from deft_backend.planner.encoding import DIRECT, OPEN_END, SPAN_SHIFT
from deft_backend.planner.plan import Plan
from deft_backend.policies import Grouping, Target
from deft_backend.policies.makespan import (
    estimated_ms,
    group_tiles,
    item_costs,
    kv_bytes,
    longest_first,
    partial_result_bytes,
)
from deft_backend.tools.explain.structure import (
    ChunkFacts,
    NodeFacts,
    describe_nodes,
    rejoin_chunks,
)

SPAN_BYTES = 4
"""Bytes that a masked tile reads for each KV token on top of keys and values: its span."""


@dataclass(frozen=True)
class PlanLoads:
    """The loads and stores of one decode step, over all requested layers."""

    # (chunk, query tile) pairs, the kernels' units of work; a tile of many KV ranges takes several.
    num_items: int
    # (item, query) pairs whose result waits in memory to be merged. A query with one item has none,
    # because the item writes the output directly. An item that merges its query's other results has
    # none either.
    num_partials: int
    # KV read by the items. If a chunk has more queries than the largest tile, each tile loads it,
    # except ranges that no query of the tile attends to.
    kv_tokens: int
    kv_bytes_issued: int
    # Queries read, once for each item (DeFT, Table 12: k · l_n · d_head), and outputs written.
    query_bytes: int
    output_bytes: int
    # Bit causal masks read (Table 12: N_tree words). Ours are spans: 4 bytes for each KV token and
    # KV head. Items of one KV range read none, and neither does a first range to which all queries
    # attend.
    mask_bytes: int
    # Partial results: for each query head an output, its float32 log-sum-exp and its float32 scale.
    # The output has 16 bits unless the model is in float32.
    partial_bytes_written: int
    partial_bytes_read: int


def count_plan_loads(
    plan: Plan,
    seq_lens: Sequence[int] | npt.NDArray[np.integer],
    target: Target,
    num_layers: int = 1,
) -> PlanLoads:
    """Count the loads and stores of stage 1 and stage 2, item by item, over `num_layers` layers.

    `seq_lens` [B] are the current tokens of each request; open ranges end there.
    """
    lens = np.asarray(seq_lens, dtype=np.int64)
    end = np.where(plan.segment_end == OPEN_END, lens[plan.segment_request], plan.segment_end)
    tokens = np.maximum(0, end - plan.segment_start)
    queries = np.diff(plan.item_query_ptr)

    single = int(plan.tile_ptr[-2])  # items of several ranges come last
    first = plan.item_segment_ptr[single:-1]
    masked = np.arange(len(tokens)) >= plan.item_segment_ptr[single]
    masked[first[plan.segment_span[first] == queries[single:] << SPAN_SHIFT]] = False

    written = int((plan.entry_slot >= 0).sum())
    merging = plan.entry_slot < DIRECT
    # An item that merges is a small tile of one query. Items up to there have one segment each, so
    # its index is also its segment's.
    entry_item = np.repeat(np.arange(plan.num_items), queries)
    merged = int(plan.segment_span[entry_item[merging]].sum())
    outputs = int((plan.entry_slot < 0).sum()) + len(plan.reduce_query)

    heads, dim, element = target.num_query_heads, target.head_dim, target.dtype_bytes
    query_vector = heads * dim * element * num_layers
    partial = partial_result_bytes(heads, dim, element) * num_layers
    kv_tokens = int(tokens.sum())
    return PlanLoads(
        num_items=plan.num_items,
        num_partials=written,
        kv_tokens=kv_tokens,
        kv_bytes_issued=kv_bytes(kv_tokens, target) * num_layers,
        query_bytes=len(plan.entry_query) * query_vector,
        output_bytes=outputs * query_vector,
        mask_bytes=int(tokens[masked].sum()) * SPAN_BYTES * target.num_kv_heads * num_layers,
        partial_bytes_written=written * partial,
        partial_bytes_read=(int(plan.reduce_ptr[-1]) + merged) * partial,
    )


@dataclass(frozen=True)
class Explanation(PlanLoads):
    """The bytes that one decode step moves under a grouping, over all requested layers."""

    batch_size: int
    num_layers: int
    # Tokens of the forest, each counted once (N_tree), and summed over queries (sum of N_i).
    tokens_stored: int
    tokens_attended: int
    share: float  # F_s = sum(N_i) / N_tree (DeFT, Table 11)
    num_groups: int  # KV ranges with their queries; chunks of one range count once
    num_chunks: int  # groups of the plan: each loads its KV once for each of its query tiles
    # KV read if each chunk is read once: ``2 · d_head`` elements a token, KV head and layer (DeFT,
    # Table 12).
    kv_bytes: int
    kv_bytes_flash_decoding: int  # KV that the Q-guided baseline reads: ``2 · d_head · sum(N_i)``
    kv_reduction_percent: float  # bytes by which `kv_bytes` is below the baseline's
    # Time of the longest thread block of one layer by the cost model, with items scheduled longest
    # first (FlashForge, equation 3).
    makespan_ms: float
    # Expected time of one layer: the longer of makespan and KV loads, plus merging.
    estimated_ms: float
    nodes: tuple[NodeFacts, ...]
    chunks: tuple[ChunkFacts, ...]

    def to_dict(self) -> dict[str, Any]:
        """Every figure, as JSON can hold it."""
        return asdict(self)


def explain(
    forest: PrefixForest, grouping: Grouping, target: Target, num_layers: int = 1
) -> Explanation:
    """Count the reads and writes of one decode step.

    - `grouping`: Any policy's grouping of `forest`.
    - `target`: Shape of the attention, and the tiles that items run in.
    - `num_layers`: layers of the model; bytes are sums over them.

    Raises ValueError if `num_layers` is not positive.

    >>> from deft_backend.forest import build_forest
    >>> from deft_backend.policies import Target, get_policy
    >>> forest = build_forest([0, 1], [100], [110, 120])
    >>> target = Target(num_query_heads=8, num_kv_heads=2, head_dim=64)
    >>> e = explain(forest, get_policy("deft-node").group(forest, target), target)
    >>> e.kv_bytes, e.kv_bytes_flash_decoding
    (66560, 117760)
    """
    if num_layers < 1:
        raise ValueError(f"num_layers is {num_layers}; expected at least 1")
    tokens = grouping.num_tokens()
    queries = grouping.num_queries().astype(np.int64)
    tiles = group_tiles(grouping, target)
    plan = plan_grouping(grouping, forest, target)
    loads = count_plan_loads(plan, forest.seq_lens, target, num_layers)

    group_of_chunk = rejoin_chunks(grouping)
    kv = kv_bytes(int(tokens.sum()), target) * num_layers
    baseline = kv_bytes(forest.tokens_attended, target) * num_layers
    schedule = longest_first(item_costs(grouping, target)[1], target.num_programs)
    return Explanation(
        **vars(loads),
        batch_size=forest.batch_size,
        num_layers=num_layers,
        tokens_stored=forest.tokens_stored,
        tokens_attended=forest.tokens_attended,
        share=forest.share,
        num_groups=max(group_of_chunk, default=-1) + 1,
        num_chunks=grouping.num_groups,
        kv_bytes=kv,
        kv_bytes_flash_decoding=baseline,
        kv_reduction_percent=100.0 * (1.0 - kv / baseline) if baseline else 0.0,
        makespan_ms=schedule.makespan_ms,
        estimated_ms=estimated_ms(grouping, target),
        nodes=describe_nodes(forest, grouping),
        chunks=tuple(
            ChunkFacts(group, t, q, kv_bytes(t, target) * num_layers, n)
            for group, t, q, n in zip(
                group_of_chunk, tokens.tolist(), queries.tolist(), tiles.tolist(), strict=True
            )
        ),
    )
