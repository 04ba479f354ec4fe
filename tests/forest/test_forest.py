"""PrefixForest: its sources against brute force, and their errors."""

import random
from ast import literal_eval
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deft_backend.forest import (
    VIRTUAL_ROOT,
    ForestError,
    build_forest,
    forest_from_page_tables,
    forest_from_paths,
    forest_of_blocks,
)
from deft_backend.forest.prefix_forest import int32
from drawings import check_asked
from forest_oracle import oracle_of_paths, oracle_of_tables, path_of

FIELDS = (
    *("order", "seq_lens", "parent", "request", "start", "length"),
    *("query_begin", "query_end", "leaf"),
)


def check_invariants(forest):
    """The invariants that the rest of the package relies on."""
    batch, nodes = forest.batch_size, forest.num_nodes
    assert sorted(forest.order.tolist()) == list(range(batch))
    assert nodes <= max(0, 2 * batch - 1) if batch else nodes == 0
    for position in range(batch):
        row = forest.order[position]
        path = path_of(forest, position)
        at = 0
        for node in path:  # the path is contiguous from 0 to the request's end
            assert forest.start[node] == at
            at += forest.length[node]
            assert forest.query_begin[node] <= position < forest.query_end[node]
        assert at == forest.seq_lens[row]
        leaf = forest.leaf[position]
        assert path[-1] == leaf
        assert forest.num_queries[leaf] == 1
        assert forest.request[leaf] == row
    for node in range(nodes):
        parent = forest.parent[node]
        assert parent < node
        assert forest.request[node] in forest.queries(node)
        if parent != VIRTUAL_ROOT:
            assert forest.query_begin[parent] <= forest.query_begin[node]
            assert forest.query_end[node] <= forest.query_end[parent]
        if not forest.is_leaf[node]:
            assert forest.length[node] > 0
            assert forest.length[node] % forest.page_size == 0
            assert forest.num_queries[node] >= 2
            assert len(forest.children[node]) >= 2  # no chains


def assert_is(forest, expected):
    for name in FIELDS:
        array = getattr(forest, name)
        assert array.dtype == np.int32, name
        assert array.tolist() == expected[name], name


def made_tables(rng, page_size, requests, longest):
    """Tables of requests that fork from one another; unused entries hold other rows' pages."""
    rows = []
    next_page = 0
    for _ in range(requests):
        head = []
        if rows and rng.random() < 0.85:
            other = rng.choice(rows)  # fork from it, be a prefix of it, or equal it
            head = other[: rng.choice([rng.randint(0, len(other)), len(other)])]
        new = rng.choice([0, 0, 1, 2, rng.randint(0, longest)])
        rows.append(head + [2**31 - 1 - page for page in range(next_page, next_page + new)])
        next_page += new
    rng.shuffle(rows)
    lens = [
        max(0, len(row) * page_size - rng.choice([0, rng.randrange(page_size)])) for row in rows
    ]
    width = max(map(len, rows), default=0) + rng.choice([0, 2])
    garbage = [page for row in rows for page in row] or [0]
    tables = np.array(
        [row + [rng.choice(garbage) for _ in range(width - len(row))] for row in rows], dtype=int
    ).reshape(requests, width)
    return tables, np.array(lens, dtype=int)


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    page_size=st.sampled_from([1, 3, 16]),
    requests=st.integers(0, 40),
    longest=st.sampled_from([3, 40, 3000]),
    dtype=st.sampled_from([np.int32, np.int64, ">i4", np.uint32]),
)
@example(seed=0, page_size=1, requests=0, longest=3, dtype=np.int32)
@example(seed=1, page_size=1, requests=40, longest=3000, dtype=np.int32)
@example(seed=2, page_size=16, requests=40, longest=40, dtype=">i4")
def test_page_tables_give_what_plain_python_finds(seed, page_size, requests, longest, dtype):
    rng = random.Random(seed)
    tables, lens = made_tables(rng, page_size, requests, longest)
    expected = oracle_of_tables(tables, lens, page_size)
    tables = tables.astype(dtype)
    tables.setflags(write=False)
    assert_is(forest_from_page_tables(tables, lens, page_size), expected)
    assert_is(forest_from_page_tables(tables, lens.tolist(), page_size, check=False), expected)


def test_long_rows_are_searched_to_the_page():
    """Every position at which two rows may differ first, for lengths around the search's steps."""
    for length in [*range(1, 60), 145, 1000]:
        base = np.arange(length, dtype=np.int32)
        for common in range(length + 1):
            other = np.where(base < common, base, base + 5000)
            forest = forest_from_page_tables(np.stack([base, other]), [length] * 2, check=False)
            assert forest.start[forest.leaf].tolist() == [common] * 2


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), requests=st.integers(0, 40), twigs=st.integers(1, 30))
@example(seed=0, requests=0, twigs=1)
@example(seed=1, requests=40, twigs=1)
@example(seed=2, requests=40, twigs=30)
def test_paths_give_what_plain_python_finds(seed, requests, twigs):
    rng = random.Random(seed)
    parent, depth = [0], [0]
    for _ in range(twigs):
        parent.append(rng.randrange(len(parent)))
        depth.append(depth[parent[-1]] + rng.randint(1, 5))
    holder = [rng.randrange(twigs + 1) for _ in range(requests)]
    lens = [depth[node] + rng.choice([0, 0, 1, 7]) for node in holder]
    paths = []
    for node in holder:
        path = []
        while node:
            path.insert(0, (("node", node), depth[node] - depth[parent[node]]))
            node = parent[node]
        paths.append(path)
    expected = oracle_of_paths(paths, lens)
    assert_is(forest_from_paths(paths, lens), expected)
    assert_is(forest_from_paths([tuple(path) for path in paths], np.array(lens)), expected)


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), requests=st.integers(1, 20))
@example(seed=0, requests=1)
@example(seed=1, requests=20)
def test_impossible_tables_that_are_trusted_stay_in_bounds(seed, requests):
    """Random tables: the result is a forest of the batch, whatever it shares."""
    rng = np.random.default_rng(seed)
    tables = rng.integers(-2, 3, (requests, 70))
    lens = rng.integers(0, 71, requests)
    check_invariants(forest_from_page_tables(tables, lens, check=False))


def test_trusted_tables_may_lack_the_open_page_but_no_full_one():
    assert forest_from_page_tables([[4], [4]], [5, 6], 4, check=False).length[0] == 4
    with pytest.raises(ForestError, match="request 1 holds 8 tokens, 2 pages of 4, but its page"):
        forest_from_page_tables([[4], [4]], [5, 8], 4, check=False)


def test_forests_keep_nothing_of_their_arguments():
    """Hosts increment their sequence lengths in place."""
    lens, order = np.array([2, 2], dtype=np.int32), np.array([1, 0], dtype=np.int32)
    tables, shared = np.array([[1, 2], [1, 3]], dtype=np.int32), np.array([1], dtype=np.int32)
    forests = [
        forest_from_page_tables(tables, lens),
        build_forest(order, shared, lens),
        forest_from_paths([[("a", 1)]] * 2, lens),
    ]
    before = [{name: getattr(f, name).tolist() for name in FIELDS} for f in forests]
    for array in (lens, order, tables, shared):
        array += 7
    assert before == [{name: getattr(f, name).tolist() for name in FIELDS} for f in forests]
    assert int32(lens, "lens") is lens
    lens.flags.writeable = False
    assert int32(lens, "lens").flags.writeable


MAKERS = {"tables": forest_from_page_tables, "sharing": build_forest, "paths": forest_from_paths}


def test_impossible_forests_are_refused():
    """Also lengths that are no integers of 32 bits, which NumPy would cut off."""

    def answer(source, *words):
        given = [literal_eval(word) for word in words]
        try:
            MAKERS[source](*given)
        except ForestError as error:
            return [str(error)]
        return ["a forest"]

    check_asked(Path(__file__).with_name("impossible.txt"), answer)


def test_forest_of_blocks():
    """Two blocks a request: a node for each request's own committed pages, and leaves."""
    forest = build_forest([0, 1, 2], [8, 0], [21, 13, 26], page_size=4)
    blocks = forest_of_blocks(forest, 2, 4)
    assert blocks.batch_size == 6
    nodes = sorted(
        (int(blocks.start[n]), int(blocks.end[n]), blocks.queries(n).tolist())
        for n in np.flatnonzero(~blocks.is_leaf)
    )
    assert nodes == [(0, 8, [0, 1, 2, 3]), (0, 20, [4, 5]), (8, 16, [0, 1])]
    leaves = [(int(blocks.start[n]), int(blocks.end[n])) for n in blocks.leaf]
    assert leaves == [(16, 21), (16, 21), (8, 13), (8, 13), (20, 26), (20, 26)]
    assert forest_of_blocks(forest, 1, 0) is forest
    assert forest.share == 60 / 52
    assert build_forest([0], [], [0]).share == 0.0
    assert forest.shared.tolist() == [8, 0]
    assert build_forest([0, 1, 2], [4, 2], [5, 6, 7]).children == ((1, 4), (2, 3), (), (), ())
