"""Forests of trees that a line describes, for `deft explain`, `deft tune` and benchmarks."""

from collections.abc import Hashable
from itertools import pairwise

from deft_backend.forest import ForestError, PrefixForest, forest_from_paths

# Limits of a described tree.
MOST_PATH_TOKENS = (1 << 31) - 1  # from root to leaf
MOST_NODES = 1 << 20  # on a level


def forest_from_levels(description: str) -> PrefixForest:
    """A tree described as ``nodes per level  tokens per node at each level``. ``1,4,16
    1024,256,32`` is one root of 1024 tokens, 4 nodes of 256 below it and 16 of 32 below those, one
    query each. Several roots make a forest. Raises ForestError.
    """
    try:
        nodes, tokens = ([int(n) for n in part.split(",")] for part in description.split())
    except ValueError:
        nodes, tokens = [], []
    falls = any(here < above for above, here in pairwise(nodes))
    if not nodes or len(nodes) != len(tokens) or min(nodes + tokens) < 1 or falls:
        raise ForestError(
            f"the tree is described as {description!r}; expected something like "
            "'1,4,16 1024,256,32': nodes per level, then tokens per node. All are 1 or more, and "
            "no level has fewer nodes than the one above it"
        )
    if sum(tokens) > MOST_PATH_TOKENS or max(nodes) > MOST_NODES:
        raise ForestError(
            f"the tree {description!r} is too large; expected at most {MOST_PATH_TOKENS:,} tokens "
            f"from root to leaf and {MOST_NODES:,} nodes on a level"
        )
    paths: list[list[tuple[Hashable, int]]] = []
    for leaf in range(nodes[-1]):
        path: list[tuple[Hashable, int]] = []
        node = leaf
        for level in reversed(range(len(nodes))):
            path.append(((level, node), tokens[level]))
            node = node * nodes[level - 1] // nodes[level] if level else 0
        paths.append(path[::-1])
    return forest_from_paths(paths, [sum(tokens)] * nodes[-1])
