"""FlashAttention-3 twice, and a merge: the form of Arctic Inference's Forest Cascade Attention.

Roots that several requests share are read once, each for all of its requests. Everything behind
them is read request by request. ``O = sum_i exp(lse_i - lse) O_i``, ``lse = log sum_i exp lse_i``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from benchmarks.kernel.case_inputs import Inputs
from benchmarks.kernel.methods import flash_attention3
from benchmarks.kernel.methods.base import Prepared, Refused

Int32 = npt.NDArray[np.int32]


class Groups(NamedTuple):
    """Groups of queries, each with KV of its own."""

    starts: Int32  # [G + 1]: first query of each group
    pages: Int32  # [G, P]
    tokens: Int32  # [G]


def two_calls(inputs: Inputs) -> tuple[npt.NDArray[np.int64], Groups, Groups]:
    """The order of the queries, the call for shared roots, and the call for the rest.

    Queries with a shared root come first, root by root. The last token of a request is never part
    of its root, so no KV of the second call is empty.
    """
    forest, size, table = inputs.forest, inputs.case.page_size, inputs.tables.page_table
    lens = inputs.tables.seq_lens
    shared: list[tuple[npt.NDArray[np.int32], int]] = []  # a root's requests, and its pages
    for root in np.flatnonzero((forest.parent < 0) & ~forest.is_leaf).tolist():
        requests = forest.queries(root)
        most = min(int(forest.end[root]), int(lens[requests].min()) - 1)
        if most >= size:
            shared.append((requests, most // size))
    if not shared:
        raise Refused("nothing is shared: a cascade of one level is no cascade")
    pages = np.array([count for _, count in shared], dtype=np.int32)
    members = [len(requests) for requests, _ in shared]
    rows = np.concatenate([requests for requests, _ in shared]).astype(np.int64)
    first = np.zeros(inputs.batch, dtype=np.int32)  # page behind the root
    first[rows] = np.repeat(pages, members)
    rows = np.append(rows, np.setdiff1d(forest.order, rows))
    tops = np.stack([table[requests[0], : pages.max()] for requests, _ in shared])
    # A page table of its own for each request, from the page behind its root on.
    width = int((inputs.tables.pages_used - first).max())
    column = np.minimum(first[:, None] + np.arange(width), table.shape[1] - 1)
    below = np.take_along_axis(table, column, 1)[rows]
    starts = np.append(0, np.cumsum(members)).astype(np.int32)
    alone = np.arange(inputs.batch + 1, dtype=np.int32)
    return (
        rows,
        Groups(starts, tops, pages * size),
        Groups(alone, below, (lens - first * size)[rows]),
    )


class ForestCascade(flash_attention3.FlashAttention3):
    """Arctic's form. It takes its queries root by root; the time to reorder them is not counted."""

    name = "fa3-cascade"

    def prepare(self, inputs: Inputs) -> Prepared:
        if inputs.query_tokens > 1 or inputs.k_cache.itemsize == 1:
            raise Refused("it takes one query token of each request, and no cache of 8 bits")
        rows, top, rest = two_calls(inputs)
        on_device = torch.from_numpy(rows).to(inputs.device)
        q, out = inputs.q[on_device].contiguous(), torch.empty_like(inputs.q)
        calls = _call(inputs, q[: top.starts[-1]], top), _call(inputs, q, rest)
        heads, dim = q.shape[1:]

        def launch() -> torch.Tensor:
            found = [call.run(return_softmax_lse=True)[:2] for call in calls]
            (of_top, top_lse), (of_rest, rest_lse) = found
            merge[(len(q), heads)](
                of_top,
                top_lse,
                of_rest,
                rest_lse,
                out,
                len(of_top),
                top_lse.stride(0),
                rest_lse.stride(0),
                heads,
                dim,
            )
            return out

        return Prepared(launch, rows=on_device, facts={"roots": len(top.tokens)})


def _call(inputs: Inputs, q: torch.Tensor, groups: Groups) -> flash_attention3.Call:
    starts, pages, tokens = (torch.from_numpy(x.copy()).to(q.device) for x in groups)
    most, longest = int(np.diff(groups.starts).max()), int(groups.tokens.max())
    where = (starts, most, pages, tokens, longest)
    return flash_attention3.Call(q, inputs.k_cache, inputs.v_cache, *where, causal=False)


@triton.jit
def merge(
    of_top,
    top_lse,
    of_rest,
    rest_lse,
    out,
    with_top,
    top_stride,
    rest_stride,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    """One query and head: the outputs [T, Hq, D] by their log-sum-exp [Hq, T]."""
    query, head = tl.program_id(0), tl.program_id(1)
    place = (query * HEADS + head) * DIM + tl.arange(0, DIM)
    result = tl.load(of_rest + place).to(tl.float32)
    if query < with_top:
        above = tl.load(top_lse + head * top_stride + query)
        below = tl.load(rest_lse + head * rest_stride + query)
        most = tl.maximum(above, below)
        above, below = tl.exp(above - most), tl.exp(below - most)
        top = tl.load(of_top + place).to(tl.float32)
        result = (top * above + result * below) / (above + below)
    tl.store(out + place, result.to(out.dtype.element_ty))
