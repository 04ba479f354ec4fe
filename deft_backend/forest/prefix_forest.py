"""PrefixForest: which requests of a batch share which part of the KV cache.

Two arrays describe a forest. The first permutes the batch so that requests that share are
neighbours. The second holds the number of tokens that neighbours share. Page tables and a host's
radix tree both yield these arrays, and :func:`build_forest` turns them into nodes. A batch that
shares nothing is a forest of single leaves and takes the same path.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]

VIRTUAL_ROOT = -1
"""Parent of every tree's root: it joins unrelated trees into one (FlashForge, section 4.1)."""


class ForestError(ValueError):
    """The input describes no forest: for example, a page table contradicts itself."""


@dataclass(frozen=True, eq=False)
class PrefixForest:
    """Nodes in depth-first order, each a KV range and the queries that attend to it.

    All arrays are NumPy arrays of int32. ``B`` is the batch size, ``N`` the number of nodes.

    *Forest order* is the permutation of the batch in which the queries of each node are neighbours.
    Each query has exactly one **leaf**: the node that only it attends to. A leaf is open: it ends
    where its request currently ends, so a request that grows needs no new forest. The leaf of a
    request that is a prefix of another, or equal to it, is empty.
    """

    order: Int32Array  # [B]: request index of each place in forest order
    seq_lens: Int32Array  # [B]: tokens of each request when the forest was built, by request index
    page_size: int  # tokens of a page; shared nodes end on page boundaries
    parent: Int32Array  # [N]: parent node, or VIRTUAL_ROOT
    # [N]: the node's tokens: positions ``start … start + length - 1`` of the context of one request
    # that holds the node.
    request: Int32Array
    start: Int32Array
    length: Int32Array
    query_begin: Int32Array
    query_end: Int32Array  # [N]: the queries that attend to the node, as a range in forest order
    leaf: Int32Array  # [B]: the leaf of each query, by place in forest order

    @property
    def batch_size(self) -> int:
        return len(self.order)

    @property
    def num_nodes(self) -> int:
        """Nodes, empty leaves included."""
        return len(self.parent)

    @cached_property
    def end(self) -> Int32Array:
        """[N] the position after the node's last token."""
        return self.start + self.length

    @cached_property
    def num_queries(self) -> Int32Array:
        """[N] queries that attend to the node."""
        return self.query_end - self.query_begin

    @cached_property
    def shared(self) -> Int32Array:
        """[B - 1] tokens that neighbours in forest order share: the node behind a query's leaf
        begins where the next query's tokens begin to differ.
        """
        return self.start[self.leaf[:-1] + 1]

    @cached_property
    def is_leaf(self) -> npt.NDArray[np.bool_]:
        """[N] whether the node is some query's leaf (private and open-ended)."""
        mask = np.zeros(self.num_nodes, dtype=bool)
        mask[self.leaf] = True
        return mask

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """[N] children of each node, in depth-first order."""
        below: list[list[int]] = [[] for _ in range(self.num_nodes)]
        for node, parent in enumerate(self.parent.tolist()):
            if parent != VIRTUAL_ROOT:
                below[parent].append(node)
        return tuple(tuple(c) for c in below)

    @property
    def tokens_stored(self) -> int:
        """Tokens of the whole forest, each counted once (DeFT, Table 11: N_tree)."""
        return int(self.length.sum(dtype=np.int64))

    @property
    def tokens_attended(self) -> int:
        """Tokens that the queries attend to, summed over queries (DeFT, Table 11: sum of N_i)."""
        return int(self.seq_lens.sum(dtype=np.int64))

    @property
    def share(self) -> float:
        """Shared factor F_s = sum(N_i) / N_tree (DeFT, Table 11); 1 when nothing is shared."""
        return self.tokens_attended / max(1, self.tokens_stored)

    def queries(self, node: int) -> Int32Array:
        """Request indices of the queries that attend to `node`."""
        return self.order[self.query_begin[node] : self.query_end[node]]


def build_forest(
    order: Sequence[int] | Int32Array,
    shared: Sequence[int] | Int32Array,
    seq_lens: Sequence[int] | Int32Array,
    page_size: int = 1,
) -> PrefixForest:
    """Build the nodes from a batch order and the tokens that neighbours share.

    Nodes end where the longest common prefix of neighbours changes. So each batch has exactly one
    forest, and no node has a single child.

    - `order` [B] int: request indices, permuted so that requests that share are neighbours.
    - `shared` [B - 1] int: tokens that the requests at places ``i`` and ``i + 1`` of `order` share.
      In a correct order the requests at places ``i < j`` share ``min(shared[i:j])`` tokens.
    - `seq_lens` [B] int: tokens of each request's context, by request index.
    - `page_size`: tokens a page; every entry of `shared` must be a multiple of it.

    Raises ForestError if `order` is not a permutation, lengths do not match, or a length is
    negative. Also if neighbours share a part of a page, or more tokens than either of them holds.
    """
    # Copy the lengths that the forest keeps: hosts write to their sequence lengths in place.
    order_ = int32(order, "order").copy()
    lens = int32(seq_lens, "seq_lens").copy()
    shared_ = int32(shared, "shared")
    _check(order_, shared_, lens, page_size)

    # Nodes as the place of their first query, their end, and the place behind their last query. One
    # stack finds the shared ones (nearest smaller values).
    nodes: list[tuple[int, int, int]] = []
    still_open = [(0, 0)]  # first place and end, outer nodes first, in a root that is no node
    for place, common in enumerate([*shared_.tolist(), 0], start=1):
        first = place - 1
        while still_open[-1][1] > common:
            first, end = still_open.pop()
            nodes.append((first, end, place))
        if still_open[-1][1] < common:
            still_open.append((first, common))
    # Depth-first order: by first place, outer before inner, and a place's leaf last.
    leaf_end = 1 << 31
    nodes += [(place, leaf_end, place + 1) for place in range(len(order_))]
    nodes.sort()

    parent: list[int] = []
    above = VIRTUAL_ROOT
    for node, (first, _, _) in enumerate(nodes):
        while above != VIRTUAL_ROOT and nodes[above][2] <= first:
            above = parent[above]
        parent.append(above)
        above = node
    begin, end, stop = np.array(nodes, dtype=np.int64).reshape(-1, 3).T
    leaf = np.flatnonzero(end == leaf_end)
    end[leaf] = lens[order_]
    parents = np.array(parent, dtype=np.int32)
    start = np.where(parents == VIRTUAL_ROOT, 0, end[parents])
    columns = (order_[begin], start, end - start, begin, stop, leaf)
    return PrefixForest(
        order_, lens, page_size, parents, *(column.astype(np.int32) for column in columns)
    )


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
    shared = np.minimum(forest.shared, np.minimum(limit[:-1], limit[1:]))
    among_blocks = np.repeat(limit[:, None], blocks - 1, axis=1)
    behind = np.append(shared, 0)[: len(order)]
    neighbours = np.concatenate((among_blocks, behind[:, None]), axis=1).reshape(-1)
    return build_forest(
        (order[:, None] * blocks + np.arange(blocks)).reshape(-1),
        neighbours[:-1],
        np.repeat(lens, blocks),
        page_size,
    )


def int32(values: npt.ArrayLike, name: str) -> Int32Array:
    """A contiguous, writable int32 array of the values; `values` itself if it is one already.

    Raises ForestError, which names the array, if a value is no integer of 32 bits.
    """
    given = np.asarray(values)
    if given.size and given.dtype.kind not in "iu":
        raise ForestError(f"{name} has dtype {given.dtype}; expected an integer dtype")
    array = np.asarray(given, dtype=np.int32, order="C")
    if array is not given and (array != given).any():
        raise ForestError(f"{name} holds {given[array != given][0]}; expected 32-bit integers")
    return array if array.flags.writeable else array.copy()


def _check(order: Int32Array, shared: Int32Array, lens: Int32Array, page_size: int) -> None:
    if page_size < 1:
        raise ForestError(f"page_size is {page_size}; expected at least 1 token a page")
    for name, array in (("order", order), ("shared", shared), ("seq_lens", lens)):
        if array.ndim != 1:
            raise ForestError(f"{name} has shape {array.shape}; expected one dimension")
    batch = len(lens)
    if (lens < 0).any():
        at = int(lens.argmin())
        raise ForestError(f"seq_lens[{at}] is {lens[at]}; expected a length of 0 or more")
    if len(order) != batch or (np.sort(order) != np.arange(batch)).any():
        raise ForestError(
            f"order is {order.tolist()}; expected a permutation of the {batch} request indices"
        )
    if len(shared) != max(0, batch - 1):
        raise ForestError(
            f"shared has {len(shared)} entries; expected {max(0, batch - 1)}, "
            f"one for each pair of neighbours in a batch of {batch}"
        )
    limit = np.minimum(lens[order[:-1]], lens[order[1:]])
    wrong = (shared < 0) | (shared > limit) | (shared % page_size != 0)
    if wrong.any():
        at = int(wrong.argmax())
        raise ForestError(
            f"requests {order[at]} and {order[at + 1]} share {shared[at]} tokens by `shared`; "
            f"expected a multiple of the page size {page_size} between 0 and {limit[at]}"
        )
