"""Random forests like those of a busy server: trees of many shapes, and requests alone."""

from __future__ import annotations

import math
import random
from collections.abc import Hashable

from deft_backend.forest import PrefixForest, forest_from_paths

_ALONE_SHARE = 0.2
_ENDS_AT_PREFIX = 0.05


def mixed_forest(seed: int, requests: int) -> PrefixForest:
    """A batch of trees of up to four shared levels, and requests that share nothing.

    Lengths are log-uniform: 16 to 8,192 tokens for shared nodes, less at deeper levels. Leaves have
    1 to 2,048 tokens, and requests that share nothing 64 to 8,192. One request in twenty has an
    empty leaf. The batch is in random order.

    - `seed`: the same seed gives the same forest.
    - `requests`: batch size.
    """
    rng = random.Random(seed)
    paths: list[list[tuple[Hashable, int]]] = []
    nodes = 0

    def node(least: int, most: int) -> tuple[Hashable, int]:
        nonlocal nodes
        nodes += 1
        return nodes, round(math.exp(rng.uniform(math.log(least), math.log(most))))

    def grow(prefix: list[tuple[Hashable, int]], count: int, level: int) -> None:
        prefix = [*prefix, node(16, 8192 >> level)]
        if count <= 2 or level == 3:
            for _ in range(count):
                ends = rng.random() < _ENDS_AT_PREFIX
                paths.append(prefix if ends else [*prefix, node(1, 2048)])
            return
        while count:
            part = rng.randint(1, count)
            grow(prefix, part, level + 1)
            count -= part

    while len(paths) < requests:
        left = requests - len(paths)
        if rng.random() < _ALONE_SHARE:
            paths.append([node(64, 8192)])
        else:
            grow([], rng.randint(1, left), 0)
    rng.shuffle(paths)
    return forest_from_paths(paths, [sum(tokens for _, tokens in path) for path in paths])
