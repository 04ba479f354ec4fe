"""A batch's forest with a query for each query block, for requests of several query tokens."""

import numpy as np

from deft_backend.forest.prefix_forest import PrefixForest, build_forest


def forest_of_blocks(forest: PrefixForest, blocks: int, private_tokens: int) -> PrefixForest:
    """The forest of the query blocks of a batch's requests.

    Block ``b`` of request ``r`` is query ``r * blocks + b``; it attends to the tokens of ``r``. No
    shared node holds any of a request's last `private_tokens` tokens: not every query token sees
    all of them. So these tokens lie in leaves, and so do the earlier tokens of their first page.

    Returns `forest`, that of the requests, itself if `blocks` is 1 and `private_tokens` is 0.
    """
    if blocks == 1 and private_tokens == 0:
        return forest
    order, lens, page_size = forest.order, forest.seq_lens, forest.page_size
    limit = np.maximum(lens - private_tokens, 0)[order] // page_size * page_size
    # In depth-first order, the node behind a query's leaf begins where the next query's tokens
    # begin to differ.
    shared = forest.start[forest.leaf[:-1] + 1]
    shared = np.minimum(shared, np.minimum(limit[:-1], limit[1:]))
    among_blocks = np.repeat(limit[:, None], blocks - 1, axis=1)
    behind = np.append(shared, 0)[: len(order)]
    neighbours = np.concatenate((among_blocks, behind[:, None]), axis=1).reshape(-1)
    return build_forest(
        (order[:, None] * blocks + np.arange(blocks)).reshape(-1),
        neighbours[:-1],
        np.repeat(lens, blocks),
        page_size,
    )
