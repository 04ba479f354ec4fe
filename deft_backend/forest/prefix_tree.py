"""The prefix tree of a batch: its insertion from a page table, and the batch order that it gives.

Rows of page tables are long, and most of their page ids are never read:

- Equality is monotone: a row that agrees with a tree node at the node's last page agrees with it
  from the root on. So each level costs one or two page ids.
- Requests that share tend to arrive together. So the search starts at the tree node of the row
  before, and climbs to the first node that the new row agrees with.
- The search reads the inside of a node only to split it, by bisection.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int32Array = npt.NDArray[np.int32]

ROOT = 0


class PrefixTree(NamedTuple):
    """Tree nodes, of which node 0 is the root, and where each request ends."""

    parent: Sequence[int] | Int32Array  # of each tree node; the root is its own
    depth: Sequence[int] | Int32Array  # from the root to the end of each tree node, in any unit
    holder: Sequence[int] | Int32Array  # [B]: tree node that holds the end of what a request shares


def insert_rows(tables: npt.NDArray[np.integer], full: Int32Array) -> PrefixTree:
    """Insert the first ``full[b]`` pages of each row of `tables` [B, P] into a tree.

    Depths count pages. Entries from ``full[b] <= P`` on are never read.
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
    return PrefixTree(parent, depth, holder)


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


def order_of_tree(tree: PrefixTree) -> tuple[Int32Array, Int32Array]:
    """Order the batch so that requests that share are neighbours.

    Returns the requests in depth-first order [B]. Also, for neighbours in this order, the depth of
    the deepest node that they have in common [max(0, B - 1)]. The children of a node and the
    requests that end there are ordered by their first request.
    """
    nodes, parent, depth = len(tree.parent), tree.parent, tree.depth
    # Children are tree nodes and, from `nodes` on, requests. Climb from each request in batch
    # order, so that each node joins its parent's children at its first request.
    children: list[list[int]] = [[] for _ in range(nodes)]
    for request, above in enumerate(tree.holder):
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
