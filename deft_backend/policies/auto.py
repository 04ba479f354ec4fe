"""`auto`: the grouping that the measured costs predict to be fastest for this forest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from deft_backend.forest import PrefixForest
from deft_backend.policies.chunk_choice import choose_chunks
from deft_backend.policies.grouping import Grouping
from deft_backend.policies.makespan import kv_bytes
from deft_backend.policies.policy import PolicyError
from deft_backend.policies.range_choice import choose_ranges, cut_ranges
from deft_backend.policies.splitting import check_limits
from deft_backend.policies.target import Target
from deft_backend.settings.policy_names import AUTO


@dataclass(frozen=True)
class Auto:
    """KV ranges by measured cost, then even chunks that fill the GPU.

    Two groupings are the extremes. Q-guided grouping reads each query's whole context and merges
    nothing. One group for each node reads each token once and merges most. FastTree's edge
    assignment lies between them. Some nodes get their own groups. The groups below the other nodes
    read those nodes' tokens again.

    `auto` makes one pass over the forest, from the root down. For each node it takes the cheaper
    way by the cost table (:class:`~deft_backend.costs.tile_costs.TileCosts`). It then chooses one
    chunk length for each tile shape (:mod:`~deft_backend.policies.chunk_choice`); FlashForge,
    section 5.1, chooses one for each task. In a batch that shares nothing, each query reads its
    whole context alone, as with `flash-decoding`. So it does in a tree whose sharing saves less
    than the merges cost.
    """

    name: ClassVar[str] = AUTO
    several_segments: ClassVar[bool] = False
    on_device: ClassVar[bool] = True

    def group(self, forest: PrefixForest, target: Target) -> Grouping:
        model = target.costs
        costs = target.tile_costs()
        tile_queries = np.array(target.single_range_tiles, dtype=np.int64)
        if len(model.tiles.item_ns) != len(tile_queries):
            raise PolicyError(
                f"the cost table holds {len(model.tiles.item_ns)} tile shapes; expected "
                f"{len(tile_queries)}: measure this version's kernels with `deft tune`"
            )
        programs_for_batch = target.programs_for(forest.batch_size)
        programs = np.array(programs_for_batch[: len(tile_queries)], dtype=np.int64)
        is_leaf = forest.is_leaf
        block = target.block_tokens
        node, begin, end = choose_ranges(
            forest.parent, forest.start, forest.length, forest.query_begin, forest.query_end,
            is_leaf, tile_queries, programs, costs,
        )  # fmt: skip
        queries = (forest.query_end - forest.query_begin)[node].astype(np.int64)
        check_limits(self.name, len(node), int(queries.sum()), target)
        chunks = choose_chunks(
            queries, end - begin, tile_queries, programs,
            target.num_sms / target.num_kv_heads, costs,
            model.transfer_ms(kv_bytes(1, target)) * 1e6, block,
        )  # fmt: skip
        while True:
            query_ptr, grouped, of_request, start, stop, is_open, count = cut_ranges(
                node, begin, end, forest.request, forest.query_begin, forest.query_end, is_leaf,
                forest.order, tile_queries, chunks, block,
            )  # fmt: skip
            if len(of_request) <= target.max_groups and len(grouped) <= target.max_group_queries:
                break
            chunks *= 2  # the undivided ranges were within the limits
        return Grouping(
            query_ptr=query_ptr,
            queries=grouped,
            segment_ptr=np.arange(len(of_request) + 1, dtype=np.int32),
            request=of_request,
            start=start,
            end=stop,
            open=is_open,
            attend_begin=np.zeros(len(of_request), dtype=np.int32),
            attend_end=count,
        )
