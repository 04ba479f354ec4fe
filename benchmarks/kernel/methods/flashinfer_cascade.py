"""FlashInfer's cascade: one level of the forest after the other, merged pair by pair."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.kernel.case_inputs import Inputs
from benchmarks.kernel.methods.base import Prepared, Refused
from benchmarks.kernel.methods.flashinfer_package import (
    FlashInferMethod,
    flashinfer,
    float_workspace,
    plan,
)
from deft_backend.forest import PrefixForest

Int32 = npt.NDArray[np.int32]


def cascade_levels(
    forest: PrefixForest, page_table: Int32
) -> list[tuple[Int32, Int32, Int32, Int32]]:
    """The forest as a cascade: ``(qo_indptr, kv_indptr, kv_indices, last_page_len)`` of each level.

    Queries are in forest order. Shared nodes are at the level of their depth, every leaf at the
    last level. Queries without tokens at a level are a group without KV.

    - `forest`: the batch's forest; its shared nodes are whole pages.
    - `page_table`: [B, P] int32
    """
    size = forest.page_size
    levels: list[list[int]] = []
    depth: dict[int, int] = {}
    for node in np.flatnonzero(~forest.is_leaf).tolist():
        depth[node] = depth.get(int(forest.parent[node]), -1) + 1
        levels += [[]] * (depth[node] == len(levels))
        levels[depth[node]].append(node)
    levels.append(forest.leaf.tolist())
    found = []
    for nodes in levels:
        queries, ends, last, pages = [0], [0], [], []
        for node in nodes:
            begin, end = int(forest.query_begin[node]), int(forest.query_end[node])
            if begin > queries[-1]:  # queries with a shorter path
                queries.append(begin)
                ends.append(ends[-1])
                last.append(0)
            start, length = int(forest.start[node]), int(forest.length[node])
            own = page_table[forest.request[node], start // size : -(-(start + length) // size)]
            pages.append(own)
            queries.append(end)
            ends.append(ends[-1] + len(own))
            last.append(length - (len(own) - 1) * size if length else 0)
        if queries[-1] < forest.batch_size:
            queries.append(forest.batch_size)
            ends.append(ends[-1])
            last.append(0)
        indices = np.concatenate(pages) if pages else np.zeros(0)
        found.append(
            tuple(np.asarray(values, dtype=np.int32) for values in (queries, ends, indices, last))
        )
    return [(queries, ends, indices, last) for queries, ends, indices, last in found]


class FlashInferCascade(FlashInferMethod):
    """``MultiLevelCascadeAttentionWrapper``, one level a level of the forest.

    It takes its queries in forest order; the time to reorder them is not counted.
    """

    name = "cascade"
    wrapper = "MultiLevelCascadeAttentionWrapper"

    def __init__(self) -> None:
        self._wrappers: dict[int, Any] = {}

    def prepare(self, inputs: Inputs) -> Prepared:
        if inputs.query_tokens > 1:
            raise Refused("it takes one query token of each request")
        if (inputs.tables.seq_lens == 0).any():
            raise Refused("FlashInfer's cascade takes no request without tokens")
        levels = cascade_levels(inputs.forest, inputs.tables.page_table)
        if len(levels) == 1:
            raise Refused("nothing is shared: a cascade of one level is no cascade")
        wrapper = self._wrappers.get(len(levels))
        if wrapper is None:
            wrapper = self._wrappers[len(levels)] = flashinfer().MultiLevelCascadeAttentionWrapper(
                len(levels), float_workspace(inputs.device), "NHD"
            )
        on_device = (
            [torch.from_numpy(values).to(inputs.device) for values in kind]
            for kind in zip(*levels, strict=True)
        )
        plan(wrapper, *on_device, inputs=inputs)
        rows = torch.from_numpy(inputs.forest.order.astype(np.int64)).to(inputs.device)
        q = inputs.q[rows].contiguous()
        cache = (inputs.k_cache, inputs.v_cache)

        def launch() -> torch.Tensor:
            out: torch.Tensor = wrapper.run(q, cache)
            return out

        return Prepared(launch, rows=rows, facts={"levels": len(levels)})
