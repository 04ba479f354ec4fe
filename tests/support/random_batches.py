"""Random batches with shared prefixes, as page tables, for tests."""

import random

import numpy as np
import torch

from attention_checks import Batch


def random_batch(seed, page_size, requests, longest=90, spare=0):
    """Unrelated trees of random shape, with equal requests, prefixes and empty requests.

    `longest` is the largest number of tokens of a node. Every request may grow by `spare` tokens
    within its page table, whose page ids are shuffled over the cache.
    """
    rng = random.Random(seed)
    rows, lens, used = [], [], 0

    def pages(count):
        nonlocal used
        used += count
        return list(range(used - count, used))

    def grow(prefix, levels, branches):
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
    lens = torch.tensor([lens[row] for row in order], dtype=torch.int32)
    return Batch(torch.from_numpy(table), lens, max(1, used))
