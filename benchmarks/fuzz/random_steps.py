"""Random steps of a batch, each from one seed: query tokens, who sees whom, scales and sinks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.fuzz.attention_settings import AttentionSetting
from benchmarks.fuzz.forests import Int32Array, RandomBatch

SINKS = (-math.inf, -1e4, 30.0, 100.0)
"""Sinks that decide alone: they change nothing, or the output is close to 0."""


@dataclass(frozen=True, eq=False)
class RandomStep:
    """What a step adds to its batch.

    - `query_tokens`: most query tokens of a request.
    - `seq_lens`: [B] int32. Tokens of each request as the step runs.
    - `query_start`: [B + 1] int32. First row of each request in the queries, if the requests have
      different numbers.
    - `rows`: rows of the queries; some at the end may belong to no request.
    - `ancestors`: [B, query tokens, words] int64. Bits of token trees. The bits of tokens that do
      not exist are random.
    - `sinks`: [Hq] float32
    - `k_scale, v_scale`: numbers that float32 holds; 1 unless the cache has 8 bits.
    """

    query_tokens: int
    seq_lens: Int32Array
    query_start: Int32Array | None
    rows: int
    ancestors: npt.NDArray[np.int64] | None
    sinks: npt.NDArray[np.float32] | None
    k_scale: float
    v_scale: float


def draw_step(
    random: np.random.Generator, setting: AttentionSetting, batch: RandomBatch
) -> RandomStep:
    """A step of `batch` that `setting` allows."""
    most, requests = setting.query_tokens, batch.requests
    # One attention plans for several numbers of query tokens, one after the other.
    tokens = most if random.random() < 0.7 else max(1, most // 2)
    lens = batch.seq_lens
    if most > 1:  # each request grew by as many tokens as the model accepted
        grown = random.integers(0, batch.growth + 1, size=requests)
        lens = np.where(lens > 0, batch.planned_lens + grown, 0).astype(np.int32)
    counts, spare = np.full(requests, tokens), 0
    if setting.ragged:
        counts = random.integers(0, tokens + 1, size=requests)
        spare = int(random.integers(0, 3))
    starts = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
    scales = 2.0 ** random.uniform(-3, 2, size=2) if setting.eight_bits else np.ones(2)
    return RandomStep(
        query_tokens=tokens,
        seq_lens=lens,
        query_start=starts if setting.ragged else None,
        rows=int(starts[-1]) + spare,
        ancestors=_trees(random, counts, tokens) if setting.tree else None,
        sinks=_sinks(random, setting.query_heads) if setting.sinks else None,
        k_scale=float(np.float32(scales[0])),
        v_scale=float(np.float32(scales[1])),
    )


def _sinks(random: np.random.Generator, heads: int) -> npt.NDArray[np.float32]:
    if random.random() < 0.3:
        return np.full(heads, random.choice(SINKS), dtype=np.float32)
    return (3 * random.standard_normal(heads)).astype(np.float32)


def _trees(
    random: np.random.Generator, counts: npt.NDArray[Any], tokens: int
) -> npt.NDArray[np.int64]:
    """[B, tokens, words]: a tree for each request, or bits that are no tree."""
    words = -(-tokens // 64)
    seen = random.random((len(counts), tokens, 64 * words)) < 0.5
    for request, count in zip(seen, counts, strict=True):
        if random.random() < 0.2:  # each token sees any others
            continue
        nearest = int(random.choice([1, 3, tokens]))  # a chain, a narrow tree, a wide one
        request[:count, :count] = False
        for token in range(count):
            if token:
                request[token, :count] = request[random.integers(max(0, token - nearest), token)][
                    :count
                ]
            request[token, token] = True
    return np.packbits(seen, axis=-1, bitorder="little").view(np.int64)
