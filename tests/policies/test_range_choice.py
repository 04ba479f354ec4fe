"""`auto`: the choice of KV ranges with their own items, and their chunks."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deft_backend.costs.cost_model import TileCosts, default_cost_model
from deft_backend.planner.reference import plan_grouping
from deft_backend.policies import Target, get_policy
from deft_backend.policies.chunk_choice import (
    tiles_of,
)
from deft_backend.policies.edges import grouped_ranges
from deft_backend.policies.measured_chunks import (
    EXPOSED,
)
from deft_backend.policies.target import Limits
from strategies import GROWTH, batches, check_coverage, check_plan, regular_forest, targets

GQA = Target(num_query_heads=32, num_kv_heads=8, head_dim=128)
AUTO = get_policy("auto")

tile_costs = st.builds(
    lambda item, token, partial, reduce: TileCosts(tuple(item), tuple(token), partial, reduce),
    item=st.lists(st.floats(1, 1e5), min_size=2, max_size=2),
    token=st.lists(st.floats(0.1, 1e3), min_size=2, max_size=2),
    partial=st.floats(0.01, 1e4),
    reduce=st.floats(1, 1e5),
)


def with_costs(target, costs):
    return replace(target, cost_model=replace(default_cost_model(), tiles=costs))


def ranges_of(forest, target, costs):
    """Node, begin and end of every range, uncut."""
    is_cut = AUTO.cut_edges(forest, with_costs(target, costs))
    found = grouped_ranges(forest, is_cut)
    return found.node, found.begin, found.end


def parts_of(grouping):
    """Number of groups of each query."""
    return np.bincount(grouping.queries)


@settings(max_examples=100)
@given(batch=batches(), target=targets, costs=tile_costs, data=st.data())
def test_every_cost_table_gives_an_attention(batch, target, costs, data):
    grouping = AUTO.group(batch.forest(), with_costs(target, costs))
    rows = len(batch.seq_lens)
    growth = data.draw(st.lists(st.integers(0, GROWTH), min_size=rows, max_size=rows))
    check_coverage(batch, grouping, target, np.array(growth))
    assert not grouping.several_ranges.any()


@pytest.mark.parametrize(("partial_ns", "parts"), [(1e-3, 3), (1e9, 1)])
def test_what_merging_costs_decides(partial_ns, parts):
    forest = regular_forest([1, 4, 8], [2048, 2048, 64])
    costs = TileCosts((1.0, 1.0), (60.0, 28.0), partial_ns, 1.0)
    one_chunk = replace(GQA, tile_programs=(1, 1, 1))
    assert ranges_of(forest, one_chunk, costs)[0].size == {3: 1 + 4 + 32, 1: 32}[parts]
    assert (parts_of(AUTO.group(forest, with_costs(one_chunk, costs))) == parts).all()


@settings(max_examples=60)
@given(batch=batches(), slack=st.integers(0, 8), costs=tile_costs)
def test_chunks_grow_until_the_plan_holds_them(batch, slack, costs):
    forest = batch.forest()
    target = with_costs(replace(GQA, tile_programs=(64, 64, 64), block_tokens=16), costs)
    ranges = ranges_of(forest, target, costs)[0]
    queries = forest.num_queries[ranges].astype(np.int64)
    items = int(tiles_of(queries, np.array(target.single_range_tiles)).sum())
    pairs = int(queries.sum())
    limited = target.within(Limits(items + slack, pairs + slack, 1 << 30))
    grouping = AUTO.group(forest, limited)
    plan = plan_grouping(grouping, forest, limited)
    assert plan.num_items <= limited.limits.items
    assert len(plan.entry_query) <= limited.limits.entries
    check_plan(batch, plan, limited)


def costs_by_levels(fan_out, tokens, target):
    """Nanoseconds of the whole GPU for each choice of levels with ranges of their own."""
    costs, (small, large) = target.costs.tiles, target.single_range_tiles
    programs = target.programs_for(int(np.prod(fan_out)))
    nodes = np.cumprod(fan_out)
    found = {}
    for own in itertools.product((False, True), repeat=len(fan_out) - 1):
        begin, total, parts = 0, 0.0, 1
        for level, end in enumerate(np.cumsum(tokens)):
            queries = int(nodes[-1] // nodes[level])
            is_leaf = level + 1 == len(fan_out)
            if is_leaf or own[level]:
                shape = int(queries > small)
                tiles = nodes[level] * -(-queries // (small, large)[shape])
                item = 0.0 if is_leaf else costs.item_ns[shape] * (1.0 if shape else EXPOSED)
                item += (end - begin) * costs.token_ns[shape]
                total += tiles * item / programs[shape]
                begin = end
                parts += not is_leaf
        results = nodes[-1] * parts if parts > 1 else 0
        found[own] = total + results * target.partial_ns
    return found


@pytest.mark.parametrize(
    ("kv_heads", "fan_out", "tokens"),
    [
        (8, [1, 2, 2, 2, 2, 2, 2, 2, 8], [16] * 9),
        (32, [1, 16, 2, 2, 4, 4], [256, 128, 64, 16, 16, 16]),
        (32, [1, 8, 2, 2, 2, 2, 8], [256, 128, 64, 16, 16, 16, 16]),
    ],
)
def test_levels_with_items_of_their_own_are_those_of_an_exact_search(kv_heads, fan_out, tokens):
    """FastTree's trees of 1,024 requests; without a look at the level below, other levels win."""
    programs = {8: (165, 33, 33), 32: (33, 8, 8)}[kv_heads]
    target = Target(32, kv_heads, 128, tile_programs=programs)
    forest = regular_forest(fan_out, tokens)
    node, *_ = ranges_of(forest, target, target.costs.tiles)
    ends = {int(forest.start[v] + forest.length[v]) for v in node}
    costs = costs_by_levels(fan_out, tokens, target)
    best = min(costs, key=costs.get)
    own = [end for end, own in zip(np.cumsum(tokens), best, strict=False) if own]
    assert ends == {*own, sum(tokens)}
