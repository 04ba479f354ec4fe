"""The forest in plain Python: the reference for the builders, array by array; links of trees."""

import numpy as np
import torch

from deft_backend.forest import VIRTUAL_ROOT


def path_of(forest, place):
    """Nodes from the root to the leaf of the query at `place` in forest order."""
    path, node = [], int(forest.leaf[place])
    while node != VIRTUAL_ROOT:
        path.append(node)
        node = int(forest.parent[node])
    return path[::-1]


def oracle_of_tables(tables, lens, page_size):
    """From page tables: the path of a request is its full pages, one by one."""
    full = [max(0, int(n)) // page_size for n in lens]
    rows = zip(np.asarray(tables).tolist(), full, strict=True)
    return oracle_of_paths([[(page, page_size) for page in row[:n]] for row, n in rows], lens)


def oracle_of_paths(paths, lens):
    """From paths: walk a trie of dictionaries depth first."""
    root = {}
    for request, path in enumerate(paths):
        node, depth = root, 0
        for identity, tokens in path:
            depth += tokens
            node = node.setdefault(("node", identity), (depth, {}))[1]
        node["request", request] = (depth, request)
    order, shared, stack = [], [], [("node", root, 0, 0)]
    while stack:
        kind, content, depth, seam = stack.pop()
        if kind == "node":
            inner = [(name, held, below) for (name, _), (below, held) in content.items()]
            stack += [(*each, depth if at else seam) for at, each in enumerate(inner)][::-1]
            continue
        if order:
            shared.append(seam)
        order.append(content)
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


def links_of(forest):
    """[2, B, N]: first children and next siblings of token trees, each a list of parents. Token 0
    is the root, and parents come before children.
    """
    child, sibling = torch.full((2, len(forest), len(forest[0])), -1)
    for row, parents in enumerate(forest):
        for token in range(len(parents) - 1, 0, -1):
            sibling[row, token] = child[row, parents[token]]
            child[row, parents[token]] = token
    return child, sibling
