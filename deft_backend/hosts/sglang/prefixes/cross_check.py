"""``DEFT_VERIFY``: compare a forest read from the radix tree with the page tables."""

from typing import Any

import torch

from deft_backend.forest import PrefixForest, forest_from_page_tables


def disagreement(forest: PrefixForest, page_table: Any, rows: Any) -> str | None:
    """What in a forest contradicts the page tables, in one line; or None.

    All rows of a shared node's queries must hold the same page ids for its tokens. If the page
    tables are in CPU memory, the forest built from them alone must also be the same. This shows
    that the tree misses no sharing.

    - `forest`: of the batch, page size 1.
    - `page_table` [R, P] int32: SGLang's ``req_to_token``: one page id for each token.
    - `rows` [B] int: Row of `page_table` of each request, on its device.
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
