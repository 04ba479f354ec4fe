"""The forest of a batch from every kind of radix tree; the page table gives the same."""

import itertools
import random
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deft_backend.forest import forest_from_page_tables
from deft_backend.hosts.sglang import prefixes
from sglang_fakes import Tree, assert_same_forest, mode, requests_of

forest_of = partial(prefixes.forest_of_paths, prefixes.walk_paths)


class _VirtualNode:
    """As the host's class for a request whose session holds its KV."""


@pytest.mark.parametrize("seed", range(20))
def test_cut_paths_give_the_forest_of_their_tokens(seed):
    """The tree owns only a part of the requests' tokens, or all of them; nodes are cut apart."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(2) for _ in range(draw.randint(1, 9))] for _ in range(16)]
    requests, table, lens = requests_of(prompts, private=0)
    lens += np.array([draw.choice([0, 0, 1, 5]) for _ in requests])
    # The reference: a page of a node that is cut differs for each cut, and every other is private.
    pages = np.arange(1 << 20, (1 << 20) + 16 * 20).reshape(16, 20)
    for row, (request, length) in enumerate(zip(requests, lens, strict=True)):
        request.cache_protected_len = draw.randint(0, length)
        node, ends = request.last_node, []
        if draw.random() < 0.2:
            node, request.last_node = None, draw.choice([None, _VirtualNode()])
        while node is not None and node.parent is not None:
            ends = [0, *(len(node.key) + end for end in ends or [0])]
            node = node.parent
        left = min(request.cache_protected_len, length - 1)
        for begin, end in itertools.pairwise(ends):
            held = min(end, left)
            pages[row, begin:held] = table[row + 1, begin:held] + 1000 * (end - held)
    assert_same_forest(forest_of(requests, lens), forest_from_page_tables(pages, lens))


def test_a_split_changes_nothing():
    """A plan survives the split of a node: rows, ranges and requests stay."""
    tree, cached = Tree(), prefixes.CachedTree("")
    requests, _, lens = requests_of([[1, 2, 3, 4], [1, 2, 3, 4]], tree=tree)
    before = forest_of(requests, lens)
    assert cached.changed(requests)
    tree.insert([1, 2, 9])
    assert requests[0].last_node.key == [3, 4]
    assert not cached.changed(requests)
    assert cached.changed(requests[::-1])
    assert_same_forest(before, forest_of(requests, lens))


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
    assert (prefixes.tree_paths(cache) is not None) == read
    assert (prefixes.tree_paths(cache, bigrams=True) is not None) == (read or bigrams)


def test_a_tree_that_fails_is_given_up(caplog):
    """Once for each cache; another cache is tried again."""
    requests, table, lens = requests_of([[1, 2, 3, 4], [1, 2, 3, 9]])
    cache = type("RadixCache", (), {"__module__": "sglang.srt.mem_cache.radix_cache"})
    source = prefixes.CachedTree("the host decodes")
    requests[0].last_node.key = []
    given = cache()
    for _ in range(2):
        assert source.forest(given, requests, lens) is None
    assert caplog.text.count("cannot be read") == 1
    requests[0].last_node.key = [4]
    assert_same_forest(
        source.forest(cache(), requests, lens), forest_from_page_tables(table[1:], lens)
    )
    assert caplog.text.count("cannot be read") == 1
    assert source.forest(object(), requests, lens) is None


def test_the_observer_knows_its_batch_by_the_list_of_ids():
    runner, rids = object(), ["a", "b"]
    observer = prefixes.BatchObserver(runner)

    def observe(kind, rids, runner):
        batch = SimpleNamespace(reqs=["ra", "rb"], tree_cache="tree")
        made = SimpleNamespace(forward_mode=mode(kind), rids=rids)
        observer.observe(made, batch, runner)

    def seen(rids):
        return observer.of(SimpleNamespace(rids=rids))

    assert seen(rids) is None
    observe("decode", None, runner)
    assert seen(None) is None
    observe("decode", rids, runner)
    observe("decode", ["c"], object())  # another runner's batch
    assert (seen(rids).requests, seen(rids).tree_cache) == (["ra", "rb"], "tree")
    assert seen(["a", "b"]) is None  # equal, not the same
    observe("extend", ["d"], runner)
    assert seen(rids) is None


@pytest.mark.parametrize(
    ("last", "message"),
    [
        (prefixes.PathNode(8, 4, 9, 2), "node 8 .* has 2 of its 5 tokens on the device"),
        (prefixes.PathNode(8, 4, 4, 0), "node 8 .* has 0 of its 0 tokens"),
        (prefixes.PathNode(8, 5, 9, 4), "node 8 .* starts at token 5, its parent ends at 4"),
    ],
)
def test_a_path_that_is_not_on_the_device_is_refused(last, message):
    request = SimpleNamespace(last_node=8, req_pool_idx=1, cache_protected_len=9)
    with pytest.raises(prefixes.TreeError, match=message):
        prefixes.forest_of_paths(
            lambda ends: [[prefixes.PathNode(7, 0, 4, 4), last]], [request], np.array([12])
        )


# The host's own unified tree ------------------------------------------------------------------


@pytest.fixture
def unified(host):
    """Prompts in the host's `UnifiedRadixCache`, as the host puts them there after a prefill.

    Takes the kind of core and the prompts; gives the cache, requests, page table and lengths.
    """
    interface = pytest.importorskip(
        "sglang.srt.mem_cache.unified_cache.unified_tree_core_interface"
    )
    if not hasattr(interface, "TreePathNodeInfo"):
        pytest.skip("the tree of this version cannot be read")
    from array import array

    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.mem_cache.unified_cache.components import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    def make(core, prompts, bigrams=False):
        table = torch.zeros((len(prompts) + 1, 32), dtype=torch.int32)
        allocator = TokenToKVPoolAllocator(1024, torch.float32, "cpu", object(), need_sort=False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=SimpleNamespace(req_to_token=table),
            token_to_kv_pool_allocator=allocator,
            page_size=1,
            tree_components=(ComponentType.FULL,),
            tree_core_backend=core,
            is_eagle=bigrams,
        )
        cache = UnifiedRadixCache(params)
        requests, free = [], 1
        for row, prompt in enumerate(prompts, start=1):
            pages = torch.arange(free, free + len(prompt) + 3)
            free += len(pages)
            key = RadixKey(array("q", prompt), None, is_bigram=bigrams)
            node = cache.insert(InsertParams(key=key, value=pages[: len(key)])).last_device_node
            held = cache.path_device_indices(node)
            table[row, : len(key)] = held
            table[row, len(key) : len(pages)] = pages[len(key) :]
            kv = SimpleNamespace(req_pool_idx=row, cache_protected_len=len(held))
            requests.append(SimpleNamespace(last_node=node, kv=kv, rid=f"r{row}"))
        return cache, requests, table.numpy(), np.array([len(p) + 3 for p in prompts])

    return make


@pytest.mark.parametrize("core", ["rust", "python"])
@pytest.mark.parametrize("bigrams", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_the_unified_tree_and_the_page_table_agree(unified, core, bigrams, seed):
    """Later prompts split nodes of earlier prompts."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(1, 3) for _ in range(draw.randint(2, 12))] for _ in range(14)]
    cache, requests, table, lens = unified(core, prompts, bigrams)
    assert core in type(cache.tree_core).__name__.lower() or core == "python"
    assert (prefixes.tree_paths(cache) is None) == bigrams
    tree = prefixes.tree_paths(cache, bigrams=True)
    ours, theirs = (
        prefixes.forest_of_paths(tree, requests, lens),
        forest_from_page_tables(table[1:], lens),
    )
    assert ours.tokens_stored < ours.tokens_attended
    assert_same_forest(ours, theirs)


@pytest.mark.parametrize("core", ["rust", "python"])
def test_what_the_unified_tree_does_not_own_is_private(unified, core):
    """A prefill without a result yet, an ended request, and a request as long as its path."""
    cache, requests, _, lens = unified(core, [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2]])
    tree = prefixes.tree_paths(cache)
    requests[1].kv.cache_protected_len = 3
    requests[2].kv.req_pool_idx = None
    lens[3] = 2
    forest = prefixes.forest_of_paths(tree, requests, lens)
    assert forest.tokens_attended - forest.tokens_stored == 2  # a part of a node is another node
    requests[1].kv.cache_protected_len = 4
    forest = prefixes.forest_of_paths(tree, requests, lens)
    shared = forest.num_queries > 1
    assert [forest.queries(n).tolist() for n in np.flatnonzero(shared)] == [[0, 1]]
    assert forest.length[shared].tolist() == [4]


def test_trees_of_several_components_are_not_read(unified):
    cache, *_ = unified("python", [[1, 2]])
    cache.tree_components = (*cache.tree_components, "sliding window")
    assert prefixes.tree_paths(cache) is None
    derived = type("LMCacheUnifiedRadixCache", (type(cache),), {"__init__": lambda self: None})
    assert prefixes.tree_paths(derived()) is None
