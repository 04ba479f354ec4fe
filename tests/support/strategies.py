"""Random batches for hypothesis, and the checkers for plans and groupings.

Batches are page tables drawn from random trees: ragged lengths, several unrelated trees, requests
that are prefixes of others, equal requests, one request, none. The checkers use only page tables
and lengths, no nodes or policies; test_planner.py shows that they find faults.
"""

from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from benchmarks.fuzz.walk_plan import fault_of
from deft_backend.forest import build_forest, forest_from_page_tables
from deft_backend.planner import plan_grouping
from deft_backend.policies import Grouping, Target

GROWTH = 40
"""Tokens that every request of a batch may grow by: its page table has room for them."""


@dataclass(frozen=True)
class Batch:
    """Requests as a host holds them."""

    page_tables: npt.NDArray[np.int32]
    seq_lens: npt.NDArray[np.int32]
    page_size: int

    def forest(self):
        return forest_from_page_tables(self.page_tables, self.seq_lens, self.page_size)


@st.composite
def batches(draw, max_requests=12, page_size=None):
    """Batches over one or several random trees."""
    page_size = page_size or draw(st.sampled_from([1, 3, 16]))
    parents = []
    pages = []
    fresh = 0
    for node in range(draw(st.integers(0, 7))):
        parents.append(draw(st.integers(-1, node - 1)))
        count = draw(st.integers(1, 6 if page_size > 1 else 90))
        pages.append(list(range(fresh, fresh + count)))
        fresh += count
    tables = []
    lens = []
    for _ in range(draw(st.integers(0, max_requests))):
        node = draw(st.integers(-1, len(parents) - 1))
        path = []
        while node >= 0:
            path = pages[node] + path
            node = parents[node]
        if draw(st.booleans()):  # stop inside the path: a prefix of other requests
            path = path[: draw(st.integers(0, len(path)))]
        tail = draw(st.one_of(st.just(0), st.integers(1, 2 * page_size + 30)))
        used = -(-(tail + GROWTH) // page_size)
        tables.append(path + list(range(fresh, fresh + used)))
        fresh += used
        lens.append(len(path) * page_size + tail)
    width = max((len(t) for t in tables), default=0)
    padded = np.zeros((len(tables), width), dtype=np.int32)
    for row, table in enumerate(tables):
        padded[row, : len(table)] = table
    return Batch(padded, np.array(lens, dtype=np.int32), page_size)


targets = st.builds(
    lambda heads, programs, block, tiles, ranges, fewer, ordered: Target(
        num_query_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=64,
        num_programs=programs,
        tile_heights=tiles,
        tile_programs=(4 * programs, programs, programs),
        fewer_programs=tuple((most, count * programs) for most, count in fewer),
        tile_segments=(1, 1, ranges),
        block_tokens=block,
        ordered_height=ordered,
        ordered_from=3,
    ),
    heads=st.sampled_from([(4, 4), (8, 2), (8, 1), (12, 1)]),
    programs=st.sampled_from([1, 5, 33]),
    block=st.sampled_from([16, 64]),
    # With 12 query heads for a KV head, a tile of height 8 serves no query.
    tiles=st.sampled_from([(8, 64, 64), (16, 48, 32), (8, 24, 12)]),
    ranges=st.sampled_from([2, 32]),
    fewer=st.sampled_from([(), ((3, 1), (9, 2))]),
    ordered=st.sampled_from([0, 8]),
)


def regular_forest(fan_out, tokens):
    """A tree with `fan_out` children at each level and `tokens` tokens a node of it."""
    batch = int(np.prod(fan_out))
    depth = np.cumsum(tokens)
    shared = []
    for query in range(1, batch):
        agreed, width = 0, batch
        for fan, end in zip(fan_out, depth, strict=True):
            width //= fan
            if query // width != (query - 1) // width:
                break
            agreed = int(end)
        shared.append(agreed)
    return build_forest(np.arange(batch), shared, np.full(batch, depth[-1]))


def batch_of(forest, seed=0, page_size=1, spare=GROWTH):
    """Page tables that hold a forest, with room for `spare` more tokens; page ids in any order."""
    width = -(-(int(forest.seq_lens.max(initial=0)) + spare) // page_size)
    tables = np.zeros((forest.batch_size, width), dtype=np.int32)
    fresh = 1
    for node, leaf in enumerate(forest.is_leaf):
        start = int(forest.start[node]) // page_size
        stop = width if leaf else int(forest.end[node]) // page_size
        tables[forest.queries(node), start:stop] = np.arange(fresh, fresh + stop - start)
        fresh += stop - start
    names = np.random.default_rng(seed).permutation(fresh).astype(np.int32)
    return Batch(names[tables], forest.seq_lens.astype(np.int32), page_size)


def check_plan(batch, plan, target, growth=0):
    """Requests that have grown by `growth` tokens: every token once, and slots without gaps."""
    rows = np.arange(len(batch.seq_lens), dtype=np.int32)
    tables = np.ascontiguousarray(batch.page_tables, dtype=np.int32)
    lens = (batch.seq_lens + growth).astype(np.int32)
    fault = fault_of(plan, tables, rows, lens, batch.page_size, target)
    assert not fault, fault
    slots = plan.entry_slot[plan.entry_slot >= 0]
    assert sorted(slots.tolist()) == list(range(plan.num_partials)), "slots have gaps"


def check_coverage(batch, grouping, target, growth=0, forest=None):
    """The same of groups; `forest` is the one that they were made of, if not the batch's."""
    plan = plan_grouping(grouping, batch.forest() if forest is None else forest, target)
    check_plan(batch, plan, target, growth)


Segment = namedtuple("Segment", "request start end open attend_begin attend_end")


def grouping_of(groups):
    """Groups of queries and one :class:`Segment` each."""
    queries, segments = zip(*groups)  # noqa: B905
    fields = [np.array(field, dtype=np.int32) for field in zip(*segments)]  # noqa: B905
    fields[3] = fields[3].astype(bool)
    query_ptr = np.append(0, np.cumsum([len(of) for of in queries])).astype(np.int32)
    flat = np.concatenate(queries).astype(np.int32)
    return Grouping(query_ptr, flat, np.arange(len(groups) + 1, dtype=np.int32), *fields)
