"""The sources of a PrefixForest: page tables, or a host's radix tree. Both yield a tree in memory.

Equal page id at equal position means equal prefix, and so does an equal node on the path. Rows of
page tables are long, and most of their page ids are never read:

- Equality is monotone: a row that agrees with a tree node at the node's last page agrees with it
  from the root on. So each level costs one or two page ids.
- Requests that share tend to arrive together. So the search starts at the tree node of the row
  before, and climbs to the first node that the new row agrees with.
- The search reads the inside of a node only to split it, by bisection.
"""

from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from deft_backend.forest.prefix_forest import (
    ForestError,
    Int32Array,
    PrefixForest,
    build_forest,
    int32,
)

Path = Sequence[tuple[Hashable, int]]  # nodes from the root downwards, as (identity, tokens held)

ROOT = 0


def forest_from_page_tables(
    page_tables: npt.ArrayLike,
    seq_lens: Sequence[int] | npt.NDArray[np.integer],
    page_size: int = 1,
    *,
    check: bool = True,
) -> PrefixForest:
    """Group requests by the pages at the head of their page tables.

    - `page_tables` [B, P] int: page ids. Row ``b`` uses its first ``ceil(seq_lens[b] / page_size)``
      entries; the rest may hold anything. A page that a request fills only partly is never shared.
    - `seq_lens` [B] int: tokens of each request.
    - `page_size`: tokens a page.
    - `check`: refuse impossible tables, which reads every used entry. Pass False for tables that
      you trust.

    Returns the forest, with subtrees ordered by their first request in the batch, as in
    :func:`forest_from_paths`: both give equal arrays.

    Raises ForestError if shapes do not match, a length is no integer of 32 bits or negative, or a
    row is shorter than its full pages need. With `check`, also if a row is shorter than its last
    page needs, a used page id is negative, or two rows agree at a position but not before it.
    """
    tables = np.asarray(page_tables)
    lens = int32(seq_lens, "seq_lens")
    if lens.ndim != 1:
        raise ForestError(f"seq_lens has shape {lens.shape}; expected [batch]")
    if tables.ndim != 2 or len(tables) != len(lens):
        raise ForestError(
            f"page_tables has shape {tables.shape}; expected [{len(lens)}, pages], a row a request"
        )
    if tables.dtype.kind not in "iu":
        raise ForestError(f"page_tables has dtype {tables.dtype}; expected an integer dtype")
    if page_size < 1:
        raise ForestError(f"page_size is {page_size}; expected at least 1 token a page")
    if check:
        _check_tables(tables, lens, page_size)

    full = np.maximum(lens, 0) // page_size
    if full.size and full.max() > tables.shape[1]:
        raise _too_short(tables, lens, page_size, int(full.argmax()))
    order, shared = _order_of_tree(*_insert_rows(tables, full))
    if check:
        _check_monotone(tables, order, shared, full)
    return build_forest(order, shared * page_size, lens, page_size)


def forest_from_paths(
    paths: Sequence[Path], seq_lens: Sequence[int] | npt.NDArray[np.integer], page_size: int = 1
) -> PrefixForest:
    """Group requests by the radix-tree nodes that they hold.

    - `paths` [B]: for each request, the tree nodes that hold the head of its context, root first.
      What a request holds beyond its path is private to it.
    - `seq_lens` [B] int: tokens of each request.
    - `page_size`: tokens a page; a radix tree holds whole pages only.

    Returns the same arrays that :func:`forest_from_page_tables` makes of the same batch. Nodes that
    only one request of the batch holds become part of its leaf. Chains of nodes that the same
    requests hold become one node. Subtrees are ordered by their first request.

    Raises ForestError if the numbers of paths and lengths differ, a node's length is not positive,
    or a path holds more tokens than its request.
    """
    if len(paths) != len(seq_lens):
        raise ForestError(
            f"{len(paths)} paths for {len(seq_lens)} sequence lengths; expected as many of each"
        )
    lens = int32(seq_lens, "seq_lens")
    children: dict[tuple[int, Hashable], int] = {}  # (node, identity of the child) -> child
    parent, depth, holder = [ROOT], [0], []
    for request, path in enumerate(paths):
        node = ROOT
        for identity, tokens in path:
            if tokens <= 0:
                raise ForestError(
                    f"request {request}: node {identity!r} holds {tokens} tokens; "
                    "expected 1 or more"
                )
            child = children.get((node, identity))
            if child is None:
                child = children[node, identity] = len(parent)
                parent.append(node)
                depth.append(depth[node] + tokens)
            node = child
        holder.append(node)
        if depth[node] > lens[request]:
            raise ForestError(
                f"request {request} holds {lens[request]} tokens but its path in the radix tree "
                f"holds {depth[node]}; expected a path no longer than the request"
            )
    order, shared = _order_of_tree(parent, depth, holder)
    return build_forest(order, shared, lens, page_size)


def _check_tables(tables: npt.NDArray[np.integer], lens: Int32Array, page_size: int) -> None:
    used = -(-lens.astype(np.int64) // page_size)
    if used.size and used.max() > tables.shape[1]:
        raise _too_short(tables, lens, page_size, int(used.argmax()))
    bad = (np.arange(tables.shape[1])[None, :] < used[:, None]) & (tables < 0)
    if bad.any():
        row, at = (int(x) for x in np.argwhere(bad)[0])
        raise ForestError(
            f"page_tables[{row}, {at}] is {tables[row, at]}; expected a page id of 0 or more"
        )


def _too_short(
    tables: npt.NDArray[np.integer], lens: Int32Array, page_size: int, row: int
) -> ForestError:
    used = -(-int(lens[row]) // page_size)
    return ForestError(
        f"request {row} holds {lens[row]} tokens, {used} pages of {page_size}, but its "
        f"page table has {tables.shape[1]} entries; pass a table of at least {used}"
    )


def _check_monotone(
    tables: npt.NDArray[np.integer], order: Int32Array, shared: Int32Array, full: Int32Array
) -> None:
    """Refuse neighbours whose tables differ within their shared pages or agree beyond them."""
    rows = order.tolist()
    for left, right, pages in zip(rows[:-1], rows[1:], shared.tolist(), strict=True):
        head = tables[left, :pages] != tables[right, :pages]
        stop = int(min(full[left], full[right]))
        tail = tables[left, pages:stop] == tables[right, pages:stop]
        at = int(head.argmax()) if head.any() else pages + int(tail.argmax()) if tail.any() else -1
        if at >= 0:
            raise ForestError(
                f"requests {left} and {right} hold the same page at one position and different "
                f"pages before it (around position {at}); a page belongs to one prefix only"
            )


def _insert_rows(
    tables: npt.NDArray[np.integer], full: Int32Array
) -> tuple[list[int], list[int], list[int]]:
    """Insert the first ``full[b]`` pages of each row of `tables` [B, P] into a tree.

    Returns what :func:`_order_of_tree` takes. Depths count pages. Entries from ``full[b] <= P`` on
    are never read.
    """
    page_of = tables.item
    parent, depth, holder = [ROOT], [0], []
    row = [0]  # a row that holds the node
    children: dict[tuple[int, int], int] = {}  # (node, first page of the child) -> child

    def add(above: int, end: int, of_row: int, first_page: int) -> int:
        parent.append(above)
        depth.append(end)
        row.append(of_row)
        child = children[above, first_page] = len(parent) - 1
        return child

    node = ROOT
    for request, stop in enumerate(full.tolist()):
        while node != ROOT:
            last = depth[node] - 1
            if last < stop and page_of(request, last) == page_of(row[node], last):
                break
            node = parent[node]
        while depth[node] < stop:
            begin = depth[node]
            page = page_of(request, begin)
            child = children.get((node, page))
            if child is None:
                node = add(node, stop, request, page)
                break
            other, end = row[child], depth[child]
            common = _agreement(tables, request, other, begin + 1, min(end, stop))
            if common < end:
                upper = add(node, common, other, page)
                parent[child] = upper
                children[upper, page_of(other, common)] = child
                child = upper
            node = child
        holder.append(node)
    return parent, depth, holder


def _agreement(tables: npt.NDArray[np.integer], row: int, other: int, low: int, high: int) -> int:
    """Leading pages on which two rows agree, known to be from `low` to `high`.

    The rows differ behind these pages, also if a host holds one prefix in two copies: else a row
    could split a node twice.
    """
    page_of = tables.item
    if page_of(row, high - 1) == page_of(other, high - 1):
        return high
    high -= 1
    while low < high:
        middle = (low + high) // 2
        if page_of(row, middle) == page_of(other, middle):
            low = middle + 1
        else:
            high = middle
    return low


def _order_of_tree(
    parent: list[int], depth: list[int], holder: list[int]
) -> tuple[Int32Array, Int32Array]:
    """Order the batch so that requests that share are neighbours.

    A tree node has a `parent`, and a `depth` from the root to its end, in any unit; node 0 is the
    root, its own parent. `holder` [B] is the node that holds the end of what a request shares.

    Returns the requests in depth-first order [B]. Also, for neighbours in this order, the depth of
    the deepest node that they have in common [max(0, B - 1)]. The children of a node and the
    requests that end there are ordered by their first request.
    """
    nodes = len(parent)
    # Children are tree nodes and, from `nodes` on, requests. Climb from each request in batch
    # order, so that each node joins its parent's children at its first request.
    children: list[list[int]] = [[] for _ in range(nodes)]
    for request, above in enumerate(holder):
        child = nodes + request
        while True:
            is_linked = bool(children[above])
            children[above].append(child)
            if is_linked or above == ROOT:
                break
            child, above = above, parent[above]

    order, shared = [], []
    todo = [(ROOT, 0)] if children[ROOT] else []  # and the depth in common with what is before
    while todo:
        item, common = todo.pop()
        if item >= nodes:
            order.append(item - nodes)
            shared.append(common)
            continue
        first, *others = children[item]
        todo += [(child, depth[item]) for child in reversed(others)]
        todo.append((first, common))
    return np.array(order, dtype=np.int32), np.array(shared[1:], dtype=np.int32)
