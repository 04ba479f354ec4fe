"""The forest in plain Python: the reference for the compiled builders, array by array."""

import numpy as np

from deft_backend.forest import VIRTUAL_ROOT


def path_of(forest, place):
    """Nodes from the root to the leaf of the query at `place` in forest order."""
    path, node = [], int(forest.leaf[place])
    while node != VIRTUAL_ROOT:
        path.append(node)
        node = int(forest.parent[node])
    return path[::-1]


def oracle_of_tables(tables, lens, page_size):
    """From page tables: split groups of equal rows, with a binary search for the column."""
    full = [max(0, int(n)) // page_size for n in lens]
    order, shared = _sort_rows(np.asarray(tables), np.array(full, dtype=np.int64))
    return oracle_of_neighbours(order, [n * page_size for n in shared], [int(n) for n in lens])


def oracle_of_paths(paths, lens):
    """From paths: walk a trie of dictionaries depth first."""
    root = {}
    for request, path in enumerate(paths):
        node, depth = root, 0
        for identity, tokens in path:
            depth += tokens
            node = node.setdefault(("node", identity), (depth, {}))[1]
        node["request", request] = (depth, request)
    order = []
    shared = []

    def walk(node, depth, seam):
        for (kind, _), (below, content) in node.items():
            if kind == "request":
                if order:
                    shared.append(seam)
                order.append(content)
            else:
                walk(content, below, seam)
            seam = depth

    walk(root, 0, 0)
    return oracle_of_neighbours(order, shared, [int(n) for n in lens])


def oracle_of_neighbours(order, shared, lens):
    """From a batch order and the neighbours' shared tokens, with lists of open and closed nodes."""
    batch = len(order)
    names = ("parent", "request", "start", "length", "query_begin", "query_end", "leaf")
    found = {"order": list(order), "seq_lens": list(lens), **{name: [] for name in names}}
    lcp = [0, *shared, 0]
    opening = [[] for _ in range(batch)]
    stack = []
    for position in range(1, batch + 1):
        begin = position - 1
        while stack and stack[-1][1] > lcp[position]:
            begin, depth = stack.pop()
            opening[begin].append((depth, position))
        if lcp[position] > 0 and (not stack or stack[-1][1] < lcp[position]):
            stack.append((begin, lcp[position]))

    path = []
    end = []

    def add(position, stop, until):
        above = path[-1] if path else VIRTUAL_ROOT
        start = end[above] if path else 0
        end.append(until)
        for name, value in (
            ("parent", above),
            ("request", order[position]),
            ("start", start),
            ("length", until - start),
            ("query_begin", position),
            ("query_end", stop),
        ):
            found[name].append(value)
        return len(end) - 1

    for position in range(batch):
        while path and found["query_end"][path[-1]] <= position:
            path.pop()
        for depth, stop in sorted(opening[position]):
            path.append(add(position, stop, depth))
        found["leaf"].append(add(position, position + 1, lens[order[position]]))
    return found


def _sort_rows(tables, full):
    """The forest order, and the full pages that neighbours share."""
    batch = len(full)
    order = []
    shared = [0] * max(0, batch - 1)
    # Groups of rows (ascending) that agree on the first `pages` pages, in depth-first order.
    # Neighbours of different groups share the pages of the group that was split (`seam`).
    stack = [(np.arange(batch), 0, 0)] if batch else []
    while stack:
        rows, pages, seam = stack.pop()
        if order:
            shared[len(order) - 1] = seam
        if len(rows) == 1:
            order.append(int(rows[0]))
            continue
        parts = _split(tables, rows, pages, full)
        for part, agreed in reversed(parts[1:]):
            stack.append((part, agreed, pages))
        stack.append((*parts[0], seam))
    return order, shared


def _split(tables, rows, pages, full):
    """Split rows that agree on `pages` pages by their next page; a row that ends is alone."""
    going_on = full[rows] > pages
    parts = [(rows[i : i + 1], pages) for i in np.flatnonzero(~going_on)]
    rest = rows[going_on]
    for page in np.unique(tables[rest, pages] if len(rest) else []):
        members = rest[tables[rest, pages] == page]
        parts.append((members, _agreement(tables, members, full) if len(members) > 1 else pages))
    return sorted(parts, key=lambda part: int(part[0][0]))


def _agreement(tables, rows, full):
    """Pages on which all rows agree, by reading them."""
    for page in range(int(full[rows].min())):
        if len(set(tables[rows, page].tolist())) > 1:
            return page
    return int(full[rows].min())
