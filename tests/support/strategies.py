"""Random batches for hypothesis, and the checker for every grouping.

Batches are page tables drawn from random trees: ragged lengths, several unrelated trees, requests
that are prefixes of others, equal requests, one request, none. The checker uses only page tables
and lengths, no nodes or policies.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from deft_backend.forest import build_forest, forest_from_page_tables
from deft_backend.policies import Target

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

    def slots(self, row, start, end):
        """Physical slots of positions ``start … end - 1`` of `row`."""
        position = np.arange(start, end)
        page = self.page_tables[row, position // self.page_size].astype(np.int64)
        return page * self.page_size + position % self.page_size


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
    lambda heads, programs, block, tiles, ranges, fewer: Target(
        num_query_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=64,
        num_programs=programs,
        tile_heights=tiles,
        tile_programs=(4 * programs, programs, programs),
        fewer_programs=tuple((most, count * programs) for most, count in fewer),
        tile_segments=(1, 1, ranges),
        block_tokens=block,
    ),
    heads=st.sampled_from([(4, 4), (8, 2), (8, 1), (12, 1)]),
    programs=st.sampled_from([1, 5, 33]),
    block=st.sampled_from([16, 64]),
    # With 12 query heads for a KV head, a tile of height 8 serves no query.
    tiles=st.sampled_from([(8, 64, 64), (16, 48, 32), (8, 24, 12)]),
    ranges=st.sampled_from([2, 32]),
    fewer=st.sampled_from([(), ((3, 1), (9, 2))]),
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


def check_coverage(batch, grouping, growth):
    """Each query attends to its own tokens, each once, after growing by `growth` tokens.

    Raises
    ------
    AssertionError
        If a query attends to another's token, misses one of its own or meets it twice, or has
        not just one open segment, at its end.
    """
    now = batch.seq_lens + growth
    seen = [np.zeros(n, dtype=np.int64) for n in now]
    opened = np.zeros(len(now), dtype=np.int64)
    for group in range(grouping.num_groups):
        queries = grouping.group_queries(group).tolist()
        assert len(set(queries)) == len(queries), "a query is twice in one group"
        useful = set()
        for segment in grouping.segments(group):
            assert 0 <= segment.start <= segment.end <= batch.seq_lens[segment.request]
            if segment.open:
                assert segment.end == batch.seq_lens[segment.request], "an open segment ends early"
            end = int(now[segment.request]) if segment.open else segment.end
            slots = batch.slots(segment.request, segment.start, end)
            run = range(segment.attend_begin, segment.attend_end)
            assert 0 <= run.start < run.stop <= len(queries), "a run beyond the group's queries"
            for query in queries[run.start : run.stop]:
                useful.add(query)
                assert end <= now[query], f"query {query} attends beyond its context"
                own = batch.slots(query, segment.start, end)
                assert (slots == own).all(), f"query {query} attends to another's tokens"
                seen[query][segment.start : end] += 1
                if segment.open:
                    opened[query] += 1
                    assert end == now[query], f"query {query} has an open segment elsewhere"
        assert useful == set(queries), "a query of the group attends to none of it"
    for query, count in enumerate(seen):
        assert (count == 1).all(), f"query {query} does not attend to each token once"
    assert (opened == 1).all(), "not every query has one open segment"
