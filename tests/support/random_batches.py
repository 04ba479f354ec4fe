"""Random batches with shared prefixes, as page tables, for tests."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class PagedBatch:
    """Page tables [B, P] with page ids shuffled over the cache, and lengths [B] of a batch."""

    page_table: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    num_pages: int


def random_batch(
    seed: int,
    requests: int,
    page_size: int,
    *,
    longest: int = 90,
    spare: int = 0,
) -> PagedBatch:
    """Unrelated trees of random shape, with equal requests, prefixes and empty requests.

    `longest` is the largest number of tokens of a node. Every request may grow by `spare` tokens
    within its page table.
    """
    rng = random.Random(seed)
    rows: list[list[int]] = []
    lens: list[int] = []
    used = 0

    def pages(count: int) -> list[int]:
        nonlocal used
        used += count
        return list(range(used - count, used))

    def grow(prefix: list[int], levels: int, branches: int) -> None:
        prefix = prefix + pages(rng.randint(0, max(1, longest // page_size)))
        if branches == 1 or levels == 0:
            for _ in range(branches):
                tokens = rng.choice([0, 1, rng.randint(1, longest)])
                rows.append(prefix + pages(-(-(tokens + spare) // page_size)))
                lens.append(len(prefix) * page_size + tokens)
            return
        while branches:
            part = rng.randint(1, branches)
            grow(prefix, levels - 1, part)
            branches -= part

    while len(rows) < requests:
        left = requests - len(rows)
        grow([], rng.randint(0, 3), rng.randint(1, left))

    ids = list(range(used))
    rng.shuffle(ids)
    order = list(range(requests))
    rng.shuffle(order)
    table = np.zeros((requests, max(map(len, rows), default=0) + 1), dtype=np.int32)
    for to, row in enumerate(order):
        table[to, : len(rows[row])] = [ids[page] for page in rows[row]]
    return PagedBatch(table, np.array([lens[row] for row in order], dtype=np.int32), max(1, used))
