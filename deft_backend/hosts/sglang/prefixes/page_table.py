"""The forest of a decode batch, read from the host's page table; it works with any prefix cache."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from deft_backend.forest import PrefixForest, build_forest, forest_from_page_tables
from deft_backend.hosts.sglang.versions import place_of

LIMIT = 1 << 26  # most page ids that are copied for a batch: 256 MiB


class PageTableSource:
    """Copies the rows of a batch to CPU memory and compares them.

    On a GPU the copy waits until the previous forward has ended.

    - `page_table`: ``req_to_token``: the page id of each token, pages of one token.
    """

    def __init__(self, page_table: torch.Tensor) -> None:
        self._page_table = page_table
        self._copy = torch.empty(0, dtype=page_table.dtype)

    def forest(self, requests: Sequence[Any], seq_lens: npt.NDArray[np.integer]) -> PrefixForest:
        """Forest of a decode batch. The token being decoded has a page of its own.

        If the rows hold more than :data:`LIMIT` page ids, only the first columns are copied. Tokens
        beyond them count as not shared.
        """
        lens = np.asarray(seq_lens, dtype=np.int64)
        columns = min(int(lens.max(initial=0)), LIMIT // max(1, len(lens)))
        compared = np.clip(lens - 1, 0, columns)
        table = self._rows(requests, compared)
        forest = forest_from_page_tables(table, compared, check=False)
        shared = np.zeros(max(0, len(lens) - 1), dtype=np.int32)
        for node in np.flatnonzero(forest.num_queries > 1).tolist():  # a node after its parent
            begin, end = int(forest.query_begin[node]), int(forest.query_end[node])
            shared[begin : end - 1] = forest.end[node]
        return build_forest(forest.order, shared, np.asarray(seq_lens, dtype=np.int32))

    def _rows(
        self, requests: Sequence[Any], used: npt.NDArray[np.integer]
    ) -> npt.NDArray[np.integer]:
        """[B, columns] page ids in CPU memory: `used` of each row; the rest is undefined."""
        table = self._host_memory(len(requests), int(used.max(initial=0)))
        for index, (request, length) in enumerate(zip(requests, used.tolist(), strict=True)):
            row, _ = place_of(request)
            if row is None:
                # The host has released the request: its row may belong to another request.
                table[index, :length] = -1 - index
            else:
                table[index, :length].copy_(self._page_table[row, :length], non_blocking=True)
        if self._page_table.is_cuda:
            torch.cuda.current_stream(self._page_table.device).synchronize()
        return table.numpy()

    def _host_memory(self, rows: int, columns: int) -> torch.Tensor:
        """[rows, columns], pinned for a GPU; reallocated only to grow."""
        needed = rows * columns
        if needed > len(self._copy):
            self._copy = torch.empty(
                min(max(2 * needed, 1 << 16), LIMIT),
                dtype=self._page_table.dtype,
                pin_memory=self._page_table.is_cuda,
            )
        return self._copy[:needed].view(rows, columns)


def disagreement(forest: PrefixForest, rows: Any, page_table: Any) -> str | None:
    """``DEFT_VERIFY``: how a forest of the radix tree contradicts the page tables, or None.

    All rows of a shared node's queries must hold the same page ids for its tokens. If the page
    tables are in CPU memory, they alone must also give this forest: the tree misses no sharing.

    - `rows` [B] int: Row of `page_table` of each request, on its device.
    - `page_table` [R, P] int32: SGLang's ``req_to_token``: one page id for each token.
    """
    indices = rows.to(torch.int64)
    order = torch.from_numpy(forest.order.astype("int64")).to(indices.device)
    for node in range(forest.num_nodes):
        begin, end = int(forest.query_begin[node]), int(forest.query_end[node])
        start, stop = int(forest.start[node]), int(forest.end[node])
        if end - begin < 2 or stop == start:
            continue
        slots = page_table[indices[order[begin:end]], start:stop]
        if not bool((slots == slots[:1]).all()):
            return f"requests {forest.queries(node).tolist()} do not share tokens {start} to {stop}"
    if page_table.device.type != "cpu":
        return None
    longest = int(forest.seq_lens.max(initial=0))
    tables = page_table[indices, :longest].numpy()
    other = forest_from_page_tables(tables, forest.seq_lens, check=False)
    for name in ("order", "parent", "request", "start", "length", "query_begin", "query_end"):
        if getattr(other, name).tolist() != getattr(forest, name).tolist():
            return (
                f"the page tables give {other.num_nodes} nodes of {other.tokens_stored} tokens, "
                f"the radix tree {forest.num_nodes} of {forest.tokens_stored} ({name} differs)"
            )
    return None
