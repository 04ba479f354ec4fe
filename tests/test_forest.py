"""PrefixForest: both sources against brute force and against each other, and their refusals."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deft_backend.forest import (
    VIRTUAL_ROOT,
    ForestError,
    PrefixForest,
    build_forest,
    forest_from_page_tables,
    forest_from_paths,
)

FIELDS = (
    "order", "seq_lens", "parent", "row", "start", "length", "query_begin", "query_end", "leaf"
)  # fmt: skip


@dataclass
class ToyNode:
    """A node of a radix tree over tokens, holding one slot a token."""

    tokens: list[int]
    slots: list[int]
    children: dict[int, ToyNode] = field(default_factory=dict)


class ToyServer:
    """A radix tree with page-aligned nodes and splits, and requests with page tables.

    Independent of the package: what a host does, in the fewest lines.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.root = ToyNode([], [])
        self.next_page = 0
        self.requests: list[list[int]] = []  # slots

    def _allocate(self, tokens: int, after: list[int]) -> list[int]:
        """Slots for `tokens` more tokens of a sequence that holds `after`, page by page."""
        slots = []
        last = after[-1] if len(after) % self.page_size else None
        for _ in range(tokens):
            if last is not None and (last + 1) % self.page_size:
                last += 1
            else:
                last = self.next_page * self.page_size
                self.next_page += 1
            slots.append(last)
        return slots

    def admit(self, prompt: list[int], generated: int) -> None:
        """Prefill a prompt (its whole pages enter the tree), then decode privately."""
        whole = len(prompt) // self.page_size * self.page_size
        node, slots = self.root, []
        while len(slots) < whole:
            rest = prompt[len(slots) : whole]
            child = node.children.get(self._key(rest))
            if child is None:
                child = ToyNode(rest, self._allocate(len(rest), slots))
                node.children[self._key(rest)] = child
            same = 0
            while same < min(len(child.tokens), len(rest)) and child.tokens[same] == rest[same]:
                same += 1
            same = same // self.page_size * self.page_size
            if same < len(child.tokens):  # split
                above = ToyNode(child.tokens[:same], child.slots[:same])
                child.tokens, child.slots = child.tokens[same:], child.slots[same:]
                above.children[self._key(child.tokens)] = child
                node.children[self._key(rest)] = above
                child = above
            slots = slots + child.slots
            node = child
        slots = slots + self._allocate(len(prompt) - whole + generated, slots)
        self.requests.append(slots)

    def _key(self, tokens: list[int]) -> int:
        return hash(tuple(tokens[: self.page_size]))

    def paths(self) -> list[list[tuple[object, int]]]:
        """Each request's nodes, found by walking the final tree along its slots."""
        found = []
        for slots in self.requests:
            node, path, at = self.root, [], 0
            while True:
                below = [
                    c for c in node.children.values() if slots[at : at + len(c.slots)] == c.slots
                ]
                if not below:
                    break
                node = below[0]
                path.append((id(node), len(node.slots)))
                at += len(node.slots)
            found.append(path)
        return found

    def page_tables(self) -> tuple[np.ndarray, np.ndarray]:
        lens = np.array([len(s) for s in self.requests], dtype=np.int64)
        pages = -(-lens // self.page_size)
        table = np.full((len(lens), int(pages.max(initial=0)) + 1), -7)
        for row, slots in enumerate(self.requests):
            table[row, : pages[row]] = [s // self.page_size for s in slots[:: self.page_size]]
        return table, lens


def traffic(seed: int, page_size: int, requests: int) -> ToyServer:
    """Requests whose prompts fork from one another at random points."""
    rng = random.Random(seed)
    server = ToyServer(page_size)
    prompts: list[list[int]] = []
    for _ in range(requests):
        prompt: list[int] = []
        if prompts and rng.random() < 0.8:
            parent = rng.choice(prompts)
            prompt = parent[: rng.randint(0, len(parent))]
        prompt = prompt + [rng.randrange(4) for _ in range(rng.choice([0, 1, 5, 40]))]
        prompts.append(prompt)
        server.admit(prompt, generated=rng.choice([0, 1, 9]))
    return server


def check_invariants(forest: PrefixForest) -> None:
    """What the rest of the package relies on."""
    batch, nodes = forest.batch_size, forest.num_nodes
    assert sorted(forest.order.tolist()) == list(range(batch))
    assert nodes <= max(0, 2 * batch - 1) if batch else nodes == 0
    for position in range(batch):
        row = forest.order[position]
        path = forest.path(position)
        at = 0
        for node in path:  # contiguous from 0 to the request's end, through nodes that hold it
            assert forest.start[node] == at
            at += forest.length[node]
            assert forest.query_begin[node] <= position < forest.query_end[node]
        assert at == forest.seq_lens[row]
        leaf = forest.leaf[position]
        assert path[-1] == leaf
        assert forest.num_queries[leaf] == 1
        assert forest.row[leaf] == row
    for node in range(nodes):
        parent = forest.parent[node]
        assert parent < node
        assert forest.row[node] in forest.queries(node)
        if parent != VIRTUAL_ROOT:
            assert forest.query_begin[parent] <= forest.query_begin[node]
            assert forest.query_end[node] <= forest.query_end[parent]
        if not forest.is_leaf[node]:
            assert forest.length[node] > 0
            assert forest.length[node] % forest.page_size == 0
            assert forest.num_queries[node] >= 2
            assert len(forest.children[node]) >= 2  # no chains


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    page_size=st.sampled_from([1, 3, 16]),
    requests=st.integers(0, 24),
)
def test_both_sources_agree_on_random_traffic(seed: int, page_size: int, requests: int) -> None:
    server = traffic(seed, page_size, requests)
    tables, lens = server.page_tables()
    from_tables = forest_from_page_tables(tables, lens, page_size, num_pages=server.next_page)
    from_tree = forest_from_paths(server.paths(), lens, page_size)
    check_invariants(from_tables)
    for name in FIELDS:
        np.testing.assert_array_equal(
            getattr(from_tables, name), getattr(from_tree, name), err_msg=name
        )


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    page_size=st.sampled_from([1, 4]),
    requests=st.integers(1, 12),
)
def test_sharing_is_exactly_the_common_pages(seed: int, page_size: int, requests: int) -> None:
    """For each pair, the nodes both attend to hold their common full pages and nothing else."""
    server = traffic(seed, page_size, requests)
    tables, lens = server.page_tables()
    forest = forest_from_page_tables(tables, lens, page_size)
    position = np.argsort(forest.order)
    for a in range(requests):
        for b in range(a):
            full = min(lens[a], lens[b]) // page_size
            same = tables[a, :full] == tables[b, :full]
            expected = page_size * (full if same.all() else int(same.argmin()))
            common = set(forest.path(position[a])) & set(forest.path(position[b]))
            assert sum(int(forest.length[n]) for n in common) == expected


def test_equal_and_prefix_requests_keep_open_leaves() -> None:
    forest = forest_from_page_tables([[5, 6], [5, 6], [5, 0]], [2, 2, 1])
    assert forest.order.tolist() == [0, 1, 2]
    assert forest.length[forest.leaf].tolist() == [0, 0, 0]
    assert forest.tokens_stored == 2
    assert forest.tokens_attended == 5
    assert forest.share == 2.5


def test_partly_filled_pages_are_not_shared() -> None:
    forest = forest_from_page_tables([[3, 4], [3, 4]], [7, 8], page_size=4)
    assert forest.length.tolist() == [4, 3, 4]
    assert forest.tokens_stored == 11


def test_nothing_shared_is_a_forest_of_leaves() -> None:
    forest = forest_from_page_tables([[0, 1], [2, 3], [4, 5]], [2, 2, 1])
    assert forest.num_nodes == 3
    assert forest.parent.tolist() == [VIRTUAL_ROOT] * 3
    assert forest.share == 1.0


def test_empty_batch_and_single_request() -> None:
    assert forest_from_page_tables(np.zeros((0, 4), dtype=int), []).num_nodes == 0
    assert forest_from_paths([], []).batch_size == 0
    single = forest_from_page_tables([[9, 8, 7]], [3])
    assert (single.num_nodes, single.length.tolist()) == (1, [3])


def test_depth_and_children() -> None:
    forest = build_forest([0, 1, 2], [4, 2], [5, 6, 7])
    assert forest.depth.tolist() == [0, 1, 2, 2, 1]
    assert forest.children == ((1, 4), (2, 3), (), (), ())


@pytest.mark.parametrize(
    ("tables", "lens", "page_size", "num_pages", "message"),
    [
        ([[0, 1]], [5], 2, None, "holds 5 tokens, 3 pages of 2, but its page table has 2"),
        ([[0, -3]], [2], 1, None, r"page_tables\[0, 1\] is -3"),
        ([[0, 9]], [2], 1, 9, r"page_tables\[0, 1\] is 9.*below 9"),
        ([[0, 1], [2, 1]], [2, 2], 1, None, r"requests 0 and 1 hold the same page"),
        ([[0, 1]], [-1], 1, None, r"seq_lens\[0\] is -1"),
        ([[0.5, 1.0]], [2], 1, None, r"dtype float64"),
        ([[0, 1]], [1, 1], 1, None, r"shape \(1, 2\); expected \[2, pages\]"),
        ([[0, 1]], [1], 0, None, r"page_size is 0"),
    ],
)
def test_impossible_page_tables_are_refused(
    tables: list[list[int]], lens: list[int], page_size: int, num_pages: int | None, message: str
) -> None:
    with pytest.raises(ForestError, match=message):
        forest_from_page_tables(np.array(tables), lens, page_size, num_pages=num_pages)


@pytest.mark.parametrize(
    ("order", "shared", "lens", "page_size", "message"),
    [
        ([0, 0], [1], [2, 2], 1, "permutation"),
        ([0, 1], [], [2, 2], 1, "expected 1"),
        ([0, 1], [3], [2, 4], 1, "share 3 tokens.*between 0 and 2"),
        ([0, 1], [3], [4, 4], 2, "multiple of the page size 2"),
    ],
)
def test_impossible_sharing_is_refused(
    order: list[int], shared: list[int], lens: list[int], page_size: int, message: str
) -> None:
    with pytest.raises(ForestError, match=message):
        build_forest(order, shared, lens, page_size)


@pytest.mark.parametrize(
    ("paths", "lens", "message"),
    [
        ([[("a", 3)]], [2], "holds 2 tokens but its path"),
        ([[("a", 0)]], [2], "holds 0 tokens; expected 1 or more"),
        ([], [2], "0 paths for 1"),
    ],
)
def test_impossible_paths_are_refused(
    paths: list[list[tuple[str, int]]], lens: list[int], message: str
) -> None:
    with pytest.raises(ForestError, match=message):
        forest_from_paths(paths, lens)
