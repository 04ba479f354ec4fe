"""Random batches with shared prefixes, as page tables, for tests."""

import random

import torch

import strategies
from attention_checks import Batch
from deft_backend.forest import forest_from_paths


def tensors_of(made):
    """A batch of NumPy arrays as tensors."""
    table, lens = torch.from_numpy(made.page_tables), torch.from_numpy(made.seq_lens)
    return Batch(table, lens, int(made.page_tables.max(initial=0)) + 1)


def random_batch(seed, page_size, requests, longest=90, spare=0):
    """Unrelated trees of random shape, with equal requests, prefixes and empty requests.

    `longest` is the largest number of tokens of a node. Every request may grow by `spare` tokens
    within its page table, whose page ids are shuffled over the cache.
    """
    rng = random.Random(seed)
    found = []

    def grow(path, levels, branches):
        if pages := rng.randint(0, max(1, longest // page_size)):
            path = [*path, (rng.random(), pages * page_size)]
        if branches == 1 or levels == 0:
            shared = sum(tokens for _, tokens in path)
            for _ in range(branches):
                found.append((path, shared + rng.choice([0, 1, rng.randint(1, longest)])))
            return
        while branches:
            part = rng.randint(1, branches)
            grow(path, levels - 1, part)
            branches -= part

    while len(found) < requests:
        grow([], rng.randint(0, 3), rng.randint(1, requests - len(found)))
    rng.shuffle(found)
    paths, lens = zip(*found, strict=True)
    return tensors_of(
        strategies.batch_of(forest_from_paths(paths, lens, page_size), seed, page_size, spare)
    )
