"""The prefix tree of a batch's page table, built row by row from few page ids.

Rows of page tables are long: 64k tokens span many cache lines and memory pages. Reading a page id
costs a cache miss. So the insertion reads few page ids, and no read waits for another:

- Equality is monotone: a row that agrees with an edge at its last page agrees with the whole edge.
  The same cache line holds the next page, which is the key of the next edge. So each level costs
  about one miss.
- Requests that share tend to arrive together. So the search starts at the tree node of the previous
  row. It climbs to the first node that the new row agrees with.
- The search reads the inside of an edge only to split it, several page ids at a time.
"""

import numpy as np
import numpy.typing as npt

from deft_backend.compile.host_jit import host_jit
from deft_backend.forest.nodes import Int32Array

ROOT = 0
LOOKS = 8
"""Page ids that a search reads at once from each of two rows: about the cache misses that a CPU
core has in flight."""


@host_jit
def insert_rows(
    tables: npt.NDArray[np.integer], full: Int32Array
) -> tuple[Int32Array, Int32Array, Int32Array, int]:
    """Insert the first ``full[b]`` pages of each row of `tables` [B, P] into a prefix tree.

    Entries from ``full[b] <= P`` on are never read. Returns:

    - `parent` [2 B + 1] int32: of each tree node; node 0 is the root (no pages) and its own parent.
    - `depth` [2 B + 1] int32: pages from the root to the end of each tree node.
    - `holder` [B] int32: tree node at which each row ends.
    - The number of tree nodes: `parent` and `depth` are undefined behind them.
    """
    batch = len(full)
    most = 2 * batch + 1
    parent = np.empty(most, dtype=np.int32)
    depth = np.empty(most, dtype=np.int32)
    row = np.empty(most, dtype=np.int32)  # a row that holds the node
    first = np.empty(most, dtype=np.int64)  # page at the parent's depth: the key among siblings
    last = np.empty(most, dtype=np.int64)  # page at depth - 1, of nodes with children
    inner = np.zeros(most, dtype=np.bool_)
    holder = np.empty(batch, dtype=np.int32)
    bits = 3
    while (1 << bits) < 4 * batch:
        bits += 1
    slots = np.zeros(1 << bits, dtype=np.int32)  # (node, page) -> child; 0: free
    mask = (1 << bits) - 1
    shift = np.uint64(64 - bits)

    parent[ROOT] = ROOT
    depth[ROOT] = 0
    inner[ROOT] = True
    nodes = 1
    node = ROOT
    for request in range(batch):
        stop = full[request]
        if not inner[node]:
            node = parent[node]
        while node != ROOT:
            at = depth[node]
            if at <= stop and tables[request, at - 1] == last[node]:
                break
            node = parent[node]
        while True:
            at = depth[node]
            if stop == at:
                break
            page = np.int64(tables[request, at])
            slot = _slot(node, page, shift)
            child = slots[slot]
            while child != 0 and (parent[child] != node or first[child] != page):
                slot = (slot + 1) & mask
                child = slots[slot]
            if child == 0:
                child = nodes
                nodes += 1
                slots[slot] = child
                parent[child] = node
                depth[child] = stop
                row[child] = request
                first[child] = page
                if not inner[node]:  # one row ended here; this row continues
                    inner[node] = True
                    last[node] = tables[request, at - 1]
                node = child
                break
            end = depth[child]
            other = row[child]
            if inner[child] and end <= stop and tables[request, end - 1] == last[child]:
                node = child
                continue
            common = _agreement(tables, request, other, at + 1, min(end, stop))
            if common == end:
                node = child
                continue
            middle = nodes
            nodes += 1
            slots[slot] = middle
            parent[middle] = node
            depth[middle] = common
            row[middle] = other
            first[middle] = page
            last[middle] = tables[other, common - 1]
            inner[middle] = True
            page = np.int64(tables[other, common])
            parent[child] = middle
            first[child] = page
            slot = _slot(middle, page, shift)
            while slots[slot] != 0:
                slot = (slot + 1) & mask
            slots[slot] = child
            node = middle
        holder[request] = node
    return parent, depth, holder, nodes


@host_jit
def _slot(node: int, page: int, shift: np.uint64) -> int:
    """Where the search for a child begins (multiplicative hashing)."""
    mixed = np.uint64(page) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(node)
    slot: int = np.int64((mixed * np.uint64(0xD6E8FEB86659FD93)) >> shift)
    return slot


@host_jit
def _agreement(tables: npt.NDArray[np.integer], row: int, other: int, low: int, high: int) -> int:
    """Leading pages on which two rows agree, known to be from `low` to `high`."""
    if low < high and tables[row, high - 1] == tables[other, high - 1]:
        return high
    high -= 1
    differ = high
    while high - low >= 2 * LOOKS:  # the rows agree on the first `low` pages and differ at `high`
        step = (high - low) // (LOOKS + 1)
        agreeing = 0
        for look in range(1, LOOKS + 1):  # no early exit: the misses overlap
            at = low + look * step - 1
            agreeing += tables[row, at] == tables[other, at]
        if agreeing < LOOKS:
            high = low + (agreeing + 1) * step - 1
        low += agreeing * step
    # Up to `differ`, not `high`: the rows must differ where they part, or one row could split an
    # edge twice. They may agree at `high` if a host holds one prefix in two copies.
    while low < differ and tables[row, low] == tables[other, low]:
        low += 1
    return low
