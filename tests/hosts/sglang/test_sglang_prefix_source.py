"""The forest of a batch from every kind of prefix cache, and from the page table."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from deft_backend.forest import forest_from_page_tables
from deft_backend.hosts.sglang.prefixes import page_table
from deft_backend.hosts.sglang.prefixes.page_table import PageTableSource
from deft_backend.hosts.sglang.prefixes.prefix_source import PrefixSource, tree_reader
from deft_backend.hosts.sglang.prefixes.radix_trees import TreeError, UnifiedTreeSource
from sglang_fakes import Tree, assert_same_forest, requests_of

UNKNOWN = type("SomeCache", (), {"__module__": "their.caches"})()


def random_batch(seed):
    """Prompts over a small alphabet share much; requests, page table and lengths."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(2) for _ in range(draw.randint(1, 9))] for _ in range(12)]
    return requests_of(prompts, Tree(), private=draw.randint(1, 4))


@pytest.mark.parametrize("seed", range(20))
def test_the_page_table_gives_the_forest_of_an_unknown_cache(seed):
    requests, table, lens = random_batch(seed)
    ours = PrefixSource(torch.from_numpy(table)).forest(UNKNOWN, requests, lens)
    assert_same_forest(ours, forest_from_page_tables(table[1:], lens))
    assert ours.tokens_stored < ours.tokens_attended


def test_a_larger_batch_follows_a_smaller_one():
    """The copy's memory is reused and grows; content of the previous batch is not read."""
    source = PageTableSource(torch.zeros((40, 5000), dtype=torch.int32))
    for seed in range(4):
        requests, table, lens = random_batch(seed)
        source._page_table = torch.from_numpy(table)
        for count in (2, 12, 3):
            ours = source.forest(requests[:count], lens[:count])
            assert_same_forest(ours, forest_from_page_tables(table[1 : count + 1], lens[:count]))


def test_a_request_that_the_host_released_shares_nothing():
    """Its row of the page table may be another request's."""
    requests, table, lens = requests_of([[1, 2, 3, 4]] * 3, Tree())
    source = PageTableSource(torch.from_numpy(table))
    assert source.forest(requests, lens).num_queries[0] == 3
    requests[1].req_pool_idx = None
    forest = source.forest(requests, lens)
    assert forest.tokens_stored == 5 + 4 + 1 + 1
    shared = int(np.flatnonzero(forest.num_queries == 2)[0])
    assert sorted(forest.queries(shared).tolist()) == [0, 2]
    requests[2].req_pool_idx = None  # two such requests share nothing with each other either
    assert source.forest(requests, lens).num_queries.tolist() == [1, 1, 1]


def test_the_token_being_decoded_is_private_whatever_the_table_holds():
    table = torch.arange(1, 7, dtype=torch.int32).repeat(3, 1)
    requests = [SimpleNamespace(req_pool_idx=row, cache_protected_len=0) for row in (1, 2)]
    forest = PageTableSource(table).forest(requests, np.array([6, 6]))
    assert forest.length.tolist() == [5, 1, 1]


def test_what_is_not_copied_is_not_shared(monkeypatch):
    """Huge batches are compared only by the columns that fit the memory limit."""
    requests, table, lens = requests_of([[*range(1, 30), 40], [*range(1, 30), 50]], Tree())
    monkeypatch.setattr(page_table, "LIMIT", 20)
    forest = PageTableSource(torch.from_numpy(table)).forest(requests, lens)
    assert forest.length.tolist() == [10, 21, 21]
    assert forest.tokens_attended == int(lens.sum())


def test_a_tree_that_fails_is_given_up_for_the_page_table(caplog):
    """Once for each cache; another cache is tried again."""
    requests, table, lens = requests_of([[1, 2, 3, 4], [1, 2, 3, 9]], Tree())
    cache = type("RadixCache", (), {"__module__": "sglang.srt.mem_cache.radix_cache"})
    source = PrefixSource(torch.from_numpy(table))
    expected = forest_from_page_tables(table[1:], lens)
    requests[0].last_node.key = []
    given = cache()
    for _ in range(2):
        assert_same_forest(source.forest(given, requests, lens), expected)
    assert caplog.text.count("cannot be read") == 1
    requests[0].last_node.key = [4]
    assert source.forest(cache(), requests, lens).tokens_stored == expected.tokens_stored
    assert caplog.text.count("cannot be read") == 1


def part(node, start, end, held=None):
    return SimpleNamespace(
        node_id=node, path_start=start, path_end=end,
        full_value_len=end - start if held is None else held,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ([part(7, 0, 4), part(8, 4, 9, held=2)], "node 8 .* has 2 of its 5 tokens on the device"),
        ([part(7, 0, 4), part(8, 5, 9)], "node 8 .* starts at token 5, its parent ends at 4"),
    ],
)
def test_a_path_that_is_not_on_the_device_is_refused(path, message):
    request = SimpleNamespace(last_node=8, req_pool_idx=1, cache_protected_len=9)
    with pytest.raises(TreeError, match=message):
        UnifiedTreeSource(lambda ends: [path for _ in ends]).forest([request], np.array([12]))


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
            disable=False, req_to_token_pool=SimpleNamespace(req_to_token=table),
            token_to_kv_pool_allocator=allocator, page_size=1,
            tree_components=(ComponentType.FULL,), tree_core_backend=core,
            is_eagle=bigrams,
        )  # fmt: skip
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
    assert (tree_reader(cache) is None) == bigrams
    tree = tree_reader(cache, bigrams=True)
    assert isinstance(tree, UnifiedTreeSource)
    ours, theirs = tree.forest(requests, lens), forest_from_page_tables(table[1:], lens)
    assert ours.tokens_stored < ours.tokens_attended
    assert_same_forest(ours, theirs)
    assert_same_forest(PageTableSource(torch.from_numpy(table)).forest(requests, lens), theirs)


@pytest.mark.parametrize("core", ["rust", "python"])
def test_what_the_unified_tree_does_not_own_is_private(unified, core):
    """A prefill without a result yet, an ended request, and a request as long as its path."""
    cache, requests, _, lens = unified(core, [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 2]])
    tree = tree_reader(cache)
    assert tree is not None
    requests[1].kv.cache_protected_len = 3
    requests[2].kv.req_pool_idx = None
    lens[3] = 2
    forest = tree.forest(requests, lens)
    assert forest.tokens_attended - forest.tokens_stored == 2  # a part of a node is another node
    requests[1].kv.cache_protected_len = 4
    forest = tree.forest(requests, lens)
    shared = forest.num_queries > 1
    assert [forest.queries(n).tolist() for n in np.flatnonzero(shared)] == [[0, 1]]
    assert forest.length[shared].tolist() == [4]


def test_trees_of_several_components_are_read_from_the_page_table(unified):
    cache, *_ = unified("python", [[1, 2]])
    cache.tree_components = (*cache.tree_components, "sliding window")
    assert tree_reader(cache) is None
    derived = type("LMCacheUnifiedRadixCache", (type(cache),), {"__init__": lambda self: None})
    assert tree_reader(derived()) is None
