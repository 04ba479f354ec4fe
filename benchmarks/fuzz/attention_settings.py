"""The shapes, dtypes, planners and policies of attention that the fuzzer chooses from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deft_backend.settings.policy_names import POLICY_NAMES
from deft_backend.shapes import QueryBlocks

DEVICE = "device"
"""In place of a policy's name: the device planner plans, which follows ``auto``."""

PLANNERS = (DEVICE, *POLICY_NAMES)

HEADS = ((32, 8), (28, 4), (16, 1), (32, 32), (8, 2))
FEW_KV_HEADS = 2
"""For the interpreter, which runs the programs of each KV head one after the other."""

HEAD_DIMS = (128, 64, 256, 96)

PAGE_SIZES = (1, 16, 64, 5)

TOLERANCE = {"float16": 4e-3, "bfloat16": 2.5e-2, "float32": 2e-5}
"""Largest error of one query head's output: the norm of the difference over that of the output. It
follows from the dtype of queries and output alone. A cache of 8 bits adds no error, because the
reference reads the same bytes, and this dtype holds each of their numbers."""

QUERIES = (
    (1, False, False),
    (4, False, False),
    (7, False, True),
    (3, True, False),
    (1, False, False),
    (5, True, True),
    (70, False, True),
)
"""Query tokens of a request, whether their number differs, and whether they form a tree."""

KV_DTYPES = ("", "float8_e4m3fn", "", "float8_e5m2", "")

LAYOUT_AXES = "kpthd"
"""Axes of a KV cache: keys or values, page, token of the page, KV head, element."""

LAYOUTS = (LAYOUT_AXES, "kphtd", "pkthd", "phtkd")
"""Orders of these axes in memory, as hosts have them: keys and values apart, heads before tokens,
keys and values of a page together, and a key next to its value."""

_MOST_SETTINGS = 420


@dataclass(frozen=True)
class AttentionSetting:
    """One attention: what a process compiles kernels for.

    - `dtype`: of queries and output.
    - `integers`: dtype of page table, rows and lengths.
    - `soft_cap`: soft cap of the scores; 0 for none.
    - `kv_dtype`: of the KV cache; empty: that of the queries.
    - `tensor_scales`: whether the scales of a cache of 8 bits are tensors.
    - `sinks`: dtype of the sinks; empty: none.
    - `query_tokens`: most query tokens of a request.
    - `ragged, tree`: whether requests have different numbers of query tokens, and whether these
      form trees.
    - `layout`: one of :data:`LAYOUTS`. In all but the first, queries lie next to keys and values.
    - `own_rows`: whether row ``r`` of the page table belongs to request ``r``.
    """

    query_heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: str
    integers: str
    soft_cap: float
    kv_dtype: str = ""
    tensor_scales: bool = False
    sinks: str = ""
    query_tokens: int = 1
    ragged: bool = False
    tree: bool = False
    layout: str = LAYOUT_AXES
    own_rows: bool = False

    @property
    def eight_bits(self) -> bool:
        """Whether the cache has 8 bits an element, and so scales."""
        return self.kv_dtype != ""

    @property
    def blocks(self) -> QueryBlocks:
        """The query blocks of a request that has all query tokens."""
        return QueryBlocks.of(self.query_tokens, self.query_heads // self.kv_heads)


def attention_settings(dtypes: tuple[str, ...], *, large: bool) -> list[AttentionSetting]:
    """Settings of attention. Any seven neighbours have all kinds of query tokens and of caches.

    Without `large`, none has more than :data:`FEW_KV_HEADS`.
    """
    random = np.random.default_rng(0)
    found = []
    for number in range(_MOST_SETTINGS):
        query_tokens, ragged, tree = QUERIES[number % len(QUERIES)]
        query_heads, kv_heads = HEADS[random.integers(len(HEADS))]
        fewer = 1 if large else max(1, kv_heads // FEW_KV_HEADS)
        kv_dtype = KV_DTYPES[number % len(KV_DTYPES)]
        found.append(
            AttentionSetting(
                query_heads // fewer,
                kv_heads // fewer,
                int(random.choice(HEAD_DIMS)),
                int(random.choice(PAGE_SIZES)),
                dtypes[number % len(dtypes)],
                str(random.choice(("int32", "int32", "int64"))),
                float(random.choice((0.0, 0.0, 30.0))),
                kv_dtype,
                tensor_scales=bool(kv_dtype and number % 2 == 0),
                sinks=str(random.choice(("", "", "", "float32", "bfloat16"))),
                query_tokens=query_tokens,
                ragged=ragged,
                tree=tree,
                layout=str(random.choice(LAYOUTS)),
                own_rows=bool(random.integers(4) == 0),
            )
        )
    return found
