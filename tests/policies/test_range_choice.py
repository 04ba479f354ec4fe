"""`auto`: the choice of KV ranges with their own items, and their chunks."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deft_backend.costs.cost_model import TileCosts, default_cost_model
from deft_backend.policies import Target, get_policy
from deft_backend.policies.chunk_choice import Machine, shape_costs, small_tiles
from deft_backend.policies.edges import grouped_ranges
from deft_backend.policies.measured_chunks import (
    EXPOSED,
    UNEVEN,
    Cut,
    ShapeCosts,
    cut_cost,
    cut_into,
)
from strategies import GROWTH, batches, check_coverage, regular_forest, targets

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


@settings(max_examples=100)
@given(batch=batches(), target=targets, costs=tile_costs, data=st.data())
def test_every_cost_table_gives_an_attention(batch, target, costs, data):
    grouping = AUTO.group(batch.forest(), with_costs(target, costs))
    rows = len(batch.seq_lens)
    growth = data.draw(st.lists(st.integers(0, GROWTH), min_size=rows, max_size=rows))
    check_coverage(batch, grouping, target, np.array(growth))
    assert not grouping.several_ranges.any()


def test_chunks_pay_for_stage_2_only_if_they_cause_it():
    """A range of two queries in a small tile leaves results for stage 2, even uncut."""
    machine, tokens, one = Machine(GQA, 8), np.array([300, 900]), np.array([1, 1])
    cut = cut_into(one, tokens, one, np.array([900, 300]))  # whole, and in three chunks

    def prices(queries, shape):
        beside = small_tiles(np.array(queries), tokens, machine)
        return cut_cost(cut, shape_costs(machine, shape, beside))

    caused, anyway = prices([1, 1], 0), prices([1, 2], 0)
    assert caused - anyway == pytest.approx([0, machine.costs[-1]])
    assert prices([1, 1], 1) == pytest.approx(prices([1, 2], 1))


@pytest.mark.parametrize(
    ("sms", "programs", "fullest"), [(10.0, 30, 30), (7.5, 25, 30), (5.0, 30, 25), (10.0, 24, 25)]
)
def test_one_round_of_small_tiles_costs_more_if_it_is_uneven(sms, programs, fullest):
    """25 items on 10 SMs: as if all SMs had as many items as the fullest. Two rounds spread."""
    one, tokens = np.array([1]), np.array([100])
    cut = cut_into(one, tokens, 25 * one, tokens)
    costs = ShapeCosts(False, programs, sms, 1.0, 1.0, 1.0, 1.0, 7.0, 0.0, 1.0, False)
    more = cut_cost(cut, costs) - cut_cost(cut, costs._replace(sms=25.0))
    assert more == pytest.approx(UNEVEN * 700 * (fullest / 25 - 1))


@pytest.mark.parametrize(("partial_ns", "parts"), [(1e-3, 3), (1e9, 1)])
def test_what_merging_costs_decides(partial_ns, parts):
    forest = regular_forest([1, 4, 8], [2048, 2048, 64])
    costs = TileCosts((1.0, 1.0), (60.0, 28.0), partial_ns, 1.0)
    one_chunk = replace(GQA, tile_programs=(1, 1, 1))
    assert ranges_of(forest, one_chunk, costs)[0].size == {3: 1 + 4 + 32, 1: 32}[parts]
    grouping = AUTO.group(forest, with_costs(one_chunk, costs))
    assert (np.bincount(grouping.queries) == parts).all()


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


def test_a_cut_counts_items_tokens_and_results():
    queries, tokens, tiles = (np.array(x, dtype=np.int64) for x in ([20, 3], [100, 30], [2, 1]))
    # 100 tokens in chunks of 64: two chunks, each read by two tiles; 30 tokens stay whole.
    assert cut_into(queries, tokens, tiles, np.array(64)) == Cut(
        chunk=64, longest=100, items=5, read=230, stored=130, results=40, cut_queries=20, most=2
    )
