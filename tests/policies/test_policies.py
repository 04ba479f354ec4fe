"""Every policy covers every query's context exactly once, and follows its paper."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.policy_gaps import target_on_hopper
from deft_backend import policies
from deft_backend.costs import FastTreeCoefficients
from deft_backend.forest import build_forest, forest_from_page_tables
from deft_backend.planner.reference import plan_grouping
from deft_backend.policies.chunk_choice import makespan
from deft_backend.policies.fixed_edges import DeftNodeChunk
from deft_backend.policies.grouping import longest_first
from deft_backend.policies.target import UNLIMITED, Limits
from deft_backend.tools.traces.tree_forests import forest_from_levels
from strategies import Batch, batches, check_coverage, check_plan, regular_forest, targets

PROGRAMS = {"num_programs": 16, "tile_programs": (16, 16, 16)}
MHA = policies.Target(num_query_heads=4, num_kv_heads=4, head_dim=64, **PROGRAMS)
GQA = policies.Target(num_query_heads=8, num_kv_heads=2, head_dim=64, **PROGRAMS)


# --- all policies ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", policies.POLICY_NAMES)
def test_coverage_of_pages_in_two_copies(name):
    """vLLM's rows may hold either copy of a page. Copies hold the same tokens."""
    for seed in range(40):
        random = np.random.default_rng(seed)
        rows, pages = int(random.integers(2, 9)), int(random.choice([12, 150]))
        prefix = np.zeros((rows, pages), dtype=np.int32)
        fresh = 0
        for row in range(rows):
            shared = int(random.integers(0, pages + 1)) if row else 0
            prefix[row, :shared] = prefix[random.integers(row) if row else 0, :shared]
            prefix[row, shared:] = np.arange(fresh, fresh + pages - shared)
            fresh += pages - shared
        lens = random.integers(0, 16 * pages - 7, rows).astype(np.int32)
        held = 2 * prefix + (random.random((rows, pages)) > random.choice([0.5, 0.9]))
        forest = forest_from_page_tables(held, lens, 16, check=False)
        grouping = policies.get_policy(name).group(forest, GQA)
        check_coverage(Batch(2 * prefix, lens, 16), grouping, GQA, 7, forest)


ONE_LONG = Batch(np.arange(129, dtype=np.int32)[None], np.array([129]), page_size=1)


@pytest.mark.parametrize("name", policies.POLICY_NAMES)
@settings(max_examples=40)
@given(batch=batches(), slack=st.integers(0, 8), segments=st.sampled_from([2, 32]))
@example(batch=ONE_LONG, slack=0, segments=2)
def test_limits_are_kept_or_refused_with_both_numbers(name, batch, slack, segments):
    forest = batch.forest()
    limited = replace(
        GQA,
        limits=Limits(forest.batch_size + slack, 3 * len(batch.seq_lens) + slack, 1 << 30),
        block_tokens=16,
        num_programs=64,
        tile_segments=(1, 1, segments),
    )
    try:
        grouping = policies.get_policy(name).group(forest, limited)
    except policies.PolicyError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert name != "flash-decoding", "the baseline always fits one group a query"
        items, entries, _ = limited.limits
        assert re.search(rf"holds ({items}|{entries});", refusal), refusal
        return
    plan = plan_grouping(grouping, forest, limited)
    assert plan.num_items <= limited.limits.items
    assert len(plan.entry_query) <= limited.limits.entries
    check_plan(batch, plan, limited)


# --- flash-decoding and DeFT ----------------------------------------------------------------------


def test_flash_decoding_splits_only_to_fill_the_programs():
    forest = build_forest(range(4), [0, 0, 0], [1024] * 4)
    policy = policies.get_policy("flash-decoding")
    assert policy.group(forest, replace(GQA, tile_programs=(4,) * 3)).num_groups == 4
    split = policy.group(forest, replace(GQA, tile_programs=(8,) * 3))
    assert split.num_tokens().tolist() == [512] * 8
    assert split.open.tolist() == [False, True] * 4
    # More programs than KV blocks: a chunk is never shorter than a block.
    assert policy.group(forest, replace(GQA, tile_programs=(999,) * 3)).num_groups == 64


def test_deft_node_is_one_group_a_node():
    forest = regular_forest([1, 3, 4], [100, 70, 30])
    grouping = policies.get_policy("deft-node").group(forest, GQA)
    assert grouping.num_groups == forest.num_nodes == 16
    assert grouping.num_tokens().sum() == forest.tokens_stored
    assert sorted(grouping.num_queries().tolist()) == [1] * 12 + [4] * 3 + [12]


def test_deft_node_chunk_has_table_12s_number_of_groups():
    forest = regular_forest([1, 3, 4], [1000, 129, 0])
    grouping = policies.get_policy("deft-node-chunk").group(forest, GQA)
    # k = sum_i ceil(n_i / b_s): 8 for the root, 2 for each of 3 nodes, an empty leaf stays open.
    assert grouping.num_groups == 8 + 3 * 2 + 12
    assert grouping.num_tokens()[:8].tolist() == [128] * 7 + [104]
    coarse = policies.get_policy("deft-node-chunk").group(
        forest, GQA.within(UNLIMITED._replace(items=20))
    )
    assert coarse.num_groups <= 20
    with pytest.raises(policies.PolicyError, match="chunk_tokens is 0; expected at least 1"):
        DeftNodeChunk(chunk_tokens=0)


def test_deft_flatten_has_table_12s_even_blocks():
    forest = regular_forest([1, 3, 4], [1000, 129, 31])
    grouping = policies.get_policy("deft-flatten").group(forest, GQA)
    stored = 1000 + 3 * 129 + 12 * 31
    assert grouping.num_groups == -(-stored // 128)
    assert set(grouping.num_tokens().tolist()[:-1]) == {128}
    assert grouping.num_tokens().sum() == stored
    coarse = policies.get_policy("deft-flatten").group(
        forest, GQA.within(UNLIMITED._replace(items=10))
    )
    assert coarse.num_groups <= 5


def test_flattened_chunks_double_until_the_programs_hold_all_at_once():
    forest = regular_forest([1, 8], [2000, 500])
    for programs, longest in ((47, 128), (46, 256), (23, 256), (22, 512), (1, 512)):
        target = replace(GQA, tile_programs=(132, 33, programs))
        grouping = policies.DeftFlatten().group(forest, target)
        assert grouping.num_tokens()[:-1].max() == longest
        assert policies.DeftFlatten(longer=1).group(forest, target).num_groups == 47


@pytest.mark.parametrize(("tokens", "sizes"), [(319, [128, 191]), (320, [128, 128, 64])])
def test_a_rest_of_less_than_half_a_chunk_joins_the_last_chunk(tokens, sizes):
    grouping = policies.DeftFlatten().group(regular_forest([1], [tokens]), GQA)
    assert grouping.num_tokens().tolist() == sizes


# --- FastTree -------------------------------------------------------------------------------------


PUBLISHED = json.loads((Path(__file__).parent / "fasttree_edges.json").read_text(encoding="utf-8"))


def test_fasttree_decides_as_the_published_artifact():
    """Every edge of its 15 trees at three head shapes, with the artifact's constants and tiles.

    With the shipped weights and the tiles of our kernels, 28 of the 45 assignments are the same.
    """
    as_shipped = 0
    for tree in PUBLISHED["trees"]:
        nodes, tokens = tree["nodes"], tree["tokens"]
        forest = forest_from_levels(f"{','.join(map(str, nodes))} {','.join(map(str, tokens))}")
        assert forest.num_nodes == sum(nodes)
        level = np.searchsorted(np.cumsum(tokens), forest.start + forest.length)
        for heads, expected in tree["heads"].items():
            query_heads, kv_heads = map(int, heads.split("/"))
            group = query_heads // kv_heads
            large, small = (held * group for held in expected["query_tiles"])
            target = policies.Target(
                query_heads,
                kv_heads,
                128,
                tile_heights=(small, large, large),
                tile_blocks=(32,) * 3,
            )
            policy = policies.FastTree(FastTreeCoefficients(*PUBLISHED["alpha_beta_gamma"]))
            wanted = np.array([value == "0" for value in expected["concatenated"]])[level]
            np.testing.assert_array_equal(policy.cut_edges(forest, target), wanted, err_msg=heads)
            shipped = policies.FastTree().cut_edges(forest, target_on_hopper(heads))
            as_shipped += np.array_equal(shipped, wanted)
    assert as_shipped == 28


@pytest.mark.parametrize(
    ("forest", "ends"),
    [
        (regular_forest([1, 2, 2], [64, 64, 64]), [192] * 4),
        # Query 0 ends where the shared node ends; query 1 goes on and is concatenated away.
        (build_forest([0, 1], [100], [100, 180]), [100, 180]),
    ],
    ids=["deserted parents", "a lone parent"],
)
def test_fasttree_concatenates_the_whole_path_and_drops_or_opens_parents(forest, ends):
    """Only the reduction has a cost, so every edge is concatenated: Q-guided grouping."""
    policy = policies.FastTree(FastTreeCoefficients(0.0, 0.0, 1.0))
    grouping = policy.group(forest, replace(MHA, tile_programs=(1, 1, 1)))
    assert grouping.start.tolist() == [0] * len(ends)
    assert grouping.end.tolist() == ends
    assert grouping.request.tolist() == grouping.queries.tolist() == [*range(len(ends))]
    assert grouping.open.all()


# --- FlashForge -----------------------------------------------------------------------------------


@settings(max_examples=100)
@given(batch=batches(), target=targets)
def test_flashforge_cuts_nodes_as_equation_5(batch, target):
    """Chunks of each node and tile shape are those of one cost ``c``."""
    forest = batch.forest()
    grouping = policies.get_policy("flashforge").group(forest, target)
    heights = [h for h, s in zip(target.tile_heights, target.tile_segments, strict=True) if s == 1]
    at, of_shape = 0, {}
    for node in range(forest.num_nodes):
        queries, length = int(forest.num_queries[node]), int(forest.length[node])
        shape = 0
        while shape + 1 < len(heights) and heights[shape] // target.query_vectors < queries:
            shape += 1
        cost = int(float(target.costs.time(heights[shape], length)) * 1e6)
        start, stop = forest.start[node], forest.start[node] + length
        parts = 1
        while grouping.end[at + parts - 1] != stop:
            parts += 1
        assert grouping.start[at] == start
        at += parts
        of_shape.setdefault(shape, []).append(
            (cost, parts, max(1, -(-length // target.block_tokens)))
        )
    assert at == grouping.num_groups
    for divided in of_shape.values():
        # ceil(cost / c) = parts for a common c, where blocks allow it.
        low = max((cost / parts for cost, parts, most in divided if parts < most), default=0)
        high = min((cost / (parts - 1) for cost, parts, _ in divided if parts > 1), default=np.inf)
        assert low <= high


@pytest.mark.parametrize("programs", [1, 3, 16, 40])
@settings(max_examples=60)
@given(
    ranges=st.lists(st.tuples(st.integers(1, 60_000), st.integers(1, 9)), min_size=1, max_size=30)
)
def test_the_makespans_bound_is_close_to_longest_first(programs, ranges):
    """Graham: longest-first takes at most 4/3 of the best schedule, which the bound is below."""
    slices = np.array([float(cost) for cost, _ in ranges])
    items = np.array([count for _, count in ranges], dtype=np.int64)
    bound = makespan(slices, items, programs)
    scheduled = longest_first(np.repeat(slices, items), programs)
    assert bound <= scheduled * (1 + 1e-9)
    assert scheduled <= 1.6 * bound


def test_longest_first_is_grahams_rule():
    costs = np.array([3.0, 5, 4, 3, 5, 4, 3])
    assert longest_first(costs, 3) == 11.0  # Graham's worst case: the optimum is 9
    assert longest_first(np.zeros(0), 3) == 0.0
    with pytest.raises(policies.PolicyError, match="num_programs is 0"):
        longest_first(np.ones(1), 0)


# --- docs/papers.md -------------------------------------------------------------------------------


def test_the_papers_page_names_what_exists():
    root = Path(__file__).parents[2]
    rows = re.findall(
        r"\| `([\w/]+\.py)` \| (`[^|]+`) \|", (root / "docs/papers.md").read_text(encoding="utf-8")
    )
    assert len(rows) > 35
    for path, names in rows:
        source = (root / "deft_backend" / path).read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^\s*(def |class )?{name}\b[ (:=]", source, re.MULTILINE), (
                path,
                name,
            )


def test_flattened_blocks_stay_within_what_the_kernels_address(monkeypatch):
    forest = regular_forest([1, 2], [900, 200])
    target = MHA.within(UNLIMITED._replace(items=4))
    assert policies.DeftFlatten().group(forest, target).num_groups <= 2
    monkeypatch.setattr("deft_backend.policies.deft_flatten.MAX_ITEM_TOKENS", 1024)
    with pytest.raises(policies.PolicyError, match=r"makes 6 items .* holds 4"):
        policies.DeftFlatten().group(forest, target)
