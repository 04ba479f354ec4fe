"""Forests from the host's radix tree, and the rule for a new plan."""

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deft_backend.forest import forest_from_page_tables
from deft_backend.hosts.sglang.prefixes.page_table import disagreement
from deft_backend.hosts.sglang.prefixes.prefix_source import key_of, tree_reader
from deft_backend.hosts.sglang.prefixes.radix_trees import RadixTreeSource, TreeError
from deft_backend.hosts.sglang.step.decode_plan import DecodePlanner
from deft_backend.planner.encoding import OPEN_END
from deft_backend.policies import POLICY_NAMES
from deft_backend.settings.config import Settings
from sglang_fakes import (
    EAGER,
    FakeAttention,
    Tree,
    assert_same_forest,
    make_planner,
    make_request,
    make_state,
    requests_of,
    step,
    tree_source,
)

forest_of = RadixTreeSource().forest


@pytest.mark.parametrize("seed", range(20))
def test_tree_and_page_tables_agree(seed):
    """Random prompts over a small alphabet split each other's nodes."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(2) for _ in range(draw.randint(1, 9))] for _ in range(12)]
    requests, table, lens = requests_of(prompts, Tree())
    ours, theirs = forest_of(requests, lens), forest_from_page_tables(table[1:], lens)
    assert ours.tokens_stored < ours.tokens_attended
    assert_same_forest(ours, theirs)
    rows = torch.arange(1, len(prompts) + 1)
    assert disagreement(ours, rows, torch.from_numpy(table)) is None


@pytest.mark.parametrize("seed", range(20))
def test_cut_paths_give_the_forest_of_their_tokens(seed):
    """The tree owns only a part of the requests' tokens, or all of them; nodes are cut apart."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(2) for _ in range(draw.randint(1, 9))] for _ in range(16)]
    requests, table, lens = requests_of(prompts, Tree(), private=0)
    lens += np.array([draw.choice([0, 0, 1, 5]) for _ in requests])
    # The reference: a page of a node that is cut differs for each cut, and every other is private.
    pages = np.arange(1 << 20, (1 << 20) + 16 * 20).reshape(16, 20)
    for row, (request, length) in enumerate(zip(requests, lens, strict=True)):
        request.cache_protected_len = draw.randint(0, length)
        if draw.random() < 0.1:
            request.last_node = None
        node, ends = request.last_node, []
        while node is not None and node.parent is not None:
            ends = [0, *(len(node.key) + end for end in ends or [0])]
            node = node.parent
        left = min(request.cache_protected_len, length - 1)
        for begin, end in itertools.pairwise(ends):
            held = min(end, left)
            pages[row, begin:held] = table[row + 1, begin:held] + 1000 * (end - held)
    assert_same_forest(forest_of(requests, lens), forest_from_page_tables(pages, lens))


def test_a_node_without_tokens_is_refused():
    node, _ = Tree().insert([1, 2, 3])
    node.key = []
    with pytest.raises(TreeError, match=f"node {node.id} of the radix tree holds 0 tokens"):
        forest_of([make_request(node, 3)], np.array([5]))


def test_a_split_leaves_keys_as_they_are():
    """A plan survives the split of a node: rows, ranges and keys stay."""
    tree = Tree()
    requests, _, lens = requests_of([[1, 2, 3, 4], [1, 2, 3, 4]], tree)
    before, keys = forest_of(requests, lens), [key_of(r) for r in requests]
    tree.insert([1, 2, 9])
    assert requests[0].last_node.key == [3, 4]
    assert [key_of(r) for r in requests] == keys
    assert_same_forest(before, forest_of(requests, lens))


def test_requests_without_a_place_in_the_tree_are_private():
    node, _ = Tree().insert([1, 2, 3])
    freed = make_request(node, 3, row=None)
    forest = forest_of([freed, make_request(node, 3), make_request(None, 3)], np.array([5, 5, 5]))
    assert forest.tokens_stored == 15


@pytest.mark.parametrize(
    ("name", "bigrams", "read"),
    [
        ("mem_cache.radix_cache.RadixCache", False, True),
        ("mem_cache.radix_cache.RadixCache", True, False),  # keys are shorter than requests' tokens
        ("mem_cache.chunk_cache.ChunkCache", False, True),
        ("mem_cache.chunk_cache.SWAChunkCache", False, False),
        ("mem_cache.hiradix_cache.HiRadixCache", False, False),
        ("mem_cache.unified_radix_cache.UnifiedRadixCache", False, False),  # to 0.5.21
        ("session.streaming_session.StreamingSession", False, False),
    ],
)
def test_trees_that_are_read(name, bigrams, read):
    module, _, name = f"sglang.srt.{name}".rpartition(".")
    cache = type(name, (), {"__module__": module, "is_eagle": bigrams})()
    assert (tree_reader(cache) is not None) == read
    assert (tree_reader(cache, bigrams=True) is not None) == (read or bigrams)


def test_verification_finds_a_wrong_forest():
    requests, table, lens = requests_of([[1, 2, 3], [1, 2, 4], [7, 8]], Tree())
    rows = torch.arange(1, 4)
    good = forest_of(requests, lens)
    page_table = torch.from_numpy(table)
    assert disagreement(good, rows, page_table) is None
    wrong = page_table.clone()
    wrong[2, 1] = 99
    assert "[0, 1] do not share tokens 0 to 2" in str(disagreement(good, rows, wrong))
    alone = forest_of([make_request(None, 0)] * 3, lens)  # misses shared tokens
    assert "the page tables give" in str(disagreement(alone, rows, page_table))


def test_a_steady_batch_is_planned_once():
    requests, _, lens = requests_of([[1, 2, 3], [1, 2, 4]], Tree())
    planner, attention = make_planner()
    first = step(planner, requests, lens)
    for grown in range(1, 200):
        assert step(planner, requests, lens + grown) is first
    assert len(attention.forests) == 1


def test_a_changed_composition_is_planned_anew():
    tree = Tree()
    requests, _, lens = requests_of([[1, 2, 3], [1, 2, 4], [1, 2, 3, 5]], tree)
    planner, attention = make_planner()
    step(planner, requests[:2], lens[:2])
    step(planner, requests, lens)  # joined
    step(planner, requests[1:], lens[1:])  # finished, aborted or retracted
    step(planner, requests[:0:-1], lens[:0:-1])  # another order
    assert len(attention.forests) == 4
    requests[1].last_node, _ = tree.insert([1, 2, 4, 4])  # its prefill's result is now in the tree
    requests[1].cache_protected_len = 4
    step(planner, requests[:0:-1], lens[:0:-1] + 1)
    assert len(attention.forests) == 5
    requests[1].req_pool_idx = None  # freed, but in flight for one more step
    step(planner, requests[:0:-1], lens[:0:-1] + 2)
    assert len(attention.forests) == 6
    assert attention.forests[-1].tokens_stored == attention.forests[-1].tokens_attended
    # Other requests of the same rows, nodes and lengths: a server with released memory and new
    # weights may number its nodes from 0 again.
    requests = [SimpleNamespace(**vars(request)) for request in requests]
    step(planner, requests[:0:-1], lens[:0:-1] + 2)
    assert len(attention.forests) == 7


def test_a_request_that_gave_more_to_the_tree_is_planned_anew():
    """Its node is unchanged: the tokens beyond were another request's, or its own copy."""
    node, _ = Tree().insert([1, 2, 3, 4])
    requests = [make_request(node, 2), make_request(node, 2)]
    planner, attention = make_planner()
    step(planner, requests, [9, 9])
    requests[0].cache_protected_len = requests[1].cache_protected_len = 4
    step(planner, requests, [10, 10])
    assert [forest.length[0] for forest in attention.forests] == [2, 4]


def test_a_plan_is_not_used_after_the_next_one_failed():
    """A failed planning may have overwritten the plan."""
    requests, _, lens = requests_of([[1, 2, 3], [1, 2, 4], [1, 2, 3, 5]], Tree())
    planner, attention = make_planner()
    step(planner, requests[:2], lens[:2])
    made, attention.plan = attention.plan, lambda forest: 1 / 0
    with pytest.raises(ZeroDivisionError):
        step(planner, requests, lens)
    attention.plan = made
    step(planner, requests[:2], lens[:2])
    assert len(attention.forests) == 2


@pytest.mark.parametrize("shorter", [1, 4, 30])
def test_a_newcomer_under_the_same_key_is_planned_anew(shorter):
    """Requests with equal prompts have equal keys: only lengths show another request."""
    requests, _, lens = requests_of([[1, 2, 3, 4], [1, 2, 3, 4]], Tree())
    lens += [0, 40]
    planner, attention = make_planner()
    step(planner, requests, lens)
    step(planner, requests, lens + 1)
    assert len(attention.forests) == 1
    step(planner, requests, lens - [0, shorter])
    assert len(attention.forests) == 2
    assert attention.forests[-1].seq_lens.tolist() == (lens - [0, shorter]).tolist()


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_lengths_are_kept_apart_from_the_hosts(dtype):
    """The host increments the array that it passed."""
    requests, _, lens = requests_of([[1, 2, 3, 4], [1, 2, 3, 4]], Tree())
    lens = lens.astype(dtype)
    planner, attention = make_planner()
    step(planner, requests, lens)
    lens += 5
    step(planner, requests, lens)
    lens -= 2
    step(planner, requests, lens)  # longer than planned for
    assert len(attention.forests) == 1
    lens -= 4
    step(planner, requests, lens)
    assert len(attention.forests) == 2


@pytest.mark.parametrize(("private", "growth"), [(1, 256), (3998, 1000)])
def test_leaves_that_grew_much_are_balanced_anew(private, growth):
    """Short leaves may grow by 256 tokens, long leaves by a quarter of their tokens."""
    requests, _, lens = requests_of([[1, 2], [1, 2]], Tree(), private=private)
    planner, attention = make_planner()
    step(planner, requests, lens)
    step(planner, requests, lens + growth)
    assert len(attention.forests) == 1
    step(planner, requests, lens + growth + 1)
    assert len(attention.forests) == 2


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (Settings(min_batch=3), "batch smaller than DEFT_MIN_BATCH=3"),
        (Settings(max_batch=1), "batch larger than DEFT_MAX_BATCH=1"),
    ],
)
def test_thresholds(settings, reason):
    """Two requests share 4 tokens and hold 1 each: 10 attended, 6 stored."""
    requests, _, lens = requests_of([[1, 2, 3, 4], [1, 2, 3, 4]], Tree())
    planner, attention = make_planner(settings)
    assert step(planner, requests, lens).host_reason == reason
    assert len(attention.forests) == (reason is None)


def test_a_plan_that_fails_verification_is_not_used(caplog):
    requests, _, lens = requests_of([[1, 2], [1, 2]], Tree())
    planner, attention = make_planner(check=lambda forest, batch: "row 1 is wrong")
    assert step(planner, requests, lens).host_reason == "cross-check failed"
    assert not attention.forests
    assert "row 1 is wrong" in caplog.text


@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_loaded_tokens_follow_growth(policy):
    """The loads of a step by the plan's own items, before and after every request grew by 3."""
    requests, _, lens = requests_of([[1] * 70, [1] * 60 + [2] * 9, [3] * 5], Tree())
    attention = FakeAttention(policy)
    planner = DecodePlanner(attention, tree_source(), EAGER, make_state())
    planned = step(planner, requests, lens)
    plan = attention.plan(attention.forests[0])

    def counted(lengths):
        total = 0
        for row, start, end in zip(
            plan.segment_request, plan.segment_start, plan.segment_end, strict=True
        ):
            total += (lengths[row] if end == OPEN_END else end) - start
        return total

    assert planned.loads(int(lens.sum())) == counted(lens) == plan.loaded_tokens(lens)
    assert planned.loads(int(lens.sum()) + 9) == counted(lens + 3)
