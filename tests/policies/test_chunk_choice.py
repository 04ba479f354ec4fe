"""The rule for the length of chunks gives the same prices on the CPU and on the device."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deft_backend.policies.chunk_choice import NUM_CHUNKS, Machine, choose_chunks, chunk_of
from deft_backend.policies.measured_chunks import Cut, ShapeCosts, cut_cost, cut_into
from deft_backend.policies.target import Limits

TILES = (2, 16)
"""Queries of the small and the large tile."""

costs_of_tiles = st.fixed_dictionaries(
    {
        "item_ns": st.tuples(st.floats(1, 1e5), st.floats(1, 1e5)),
        "token_ns": st.tuples(st.floats(0.1, 1e3), st.floats(0.1, 1e3)),
        "partial_ns": st.floats(0.01, 1e4),
        "reduce_ns": st.floats(1, 1e5),
        "transfer_ns": st.floats(0.01, 100),
        "programs": st.tuples(st.integers(1, 300), st.integers(1, 300)),
        "sms": st.floats(1, 132),
        "block": st.sampled_from([16, 64]),
    }
)
ranges = st.lists(st.tuples(st.integers(1, 60), st.integers(0, 20_000)), min_size=1, max_size=16)


def reference_price(found, shape, num_chunks, costs):
    """Price and chunk length of one candidate, by the functions of the reference."""
    mine = [(q, n) for q, n in found if (q > TILES[0]) == (shape == 1)]
    queries = np.array([q for q, _ in mine], dtype=np.int64)
    tokens = np.array([n for _, n in mine], dtype=np.int64)
    tiles = -(-queries // TILES[shape])
    small = [n for q, n in found if q <= TILES[0]]
    beside = costs["item_ns"][0] + sum(small) * costs["transfer_ns"] if small else 0.0
    beside /= max(1.0, len(small) / costs["programs"][0])  # the first round of them
    held = [n for n in small if n]
    even = sum(held) / len(held) / max(held) if held else 1.0
    chunk = chunk_of(int(tokens.max(initial=0)), num_chunks, costs["block"])
    cut = cut_into(queries, tokens, tiles, chunk)
    shape_costs = ShapeCosts(
        shape == 1,
        costs["programs"][shape],
        costs["sms"],
        costs["item_ns"][shape],
        costs["token_ns"][shape],
        costs["partial_ns"],
        costs["reduce_ns"],
        costs["transfer_ns"],
        beside,
        even,
    )
    return cut_cost(cut, shape_costs), chunk


@settings(max_examples=50, deadline=None)
@given(found=ranges, costs=costs_of_tiles)
def test_the_cheapest_candidate_is_chosen(found, costs):
    """The reference: a search over all candidates that fit the limits."""
    tiles, programs = (np.array(each, dtype=np.int64) for each in (TILES, costs["programs"]))
    times = [*costs["item_ns"], *costs["token_ns"], costs["partial_ns"], costs["reduce_ns"]]
    memory = (costs["transfer_ns"], costs["block"])
    machine = Machine(
        tiles, programs, costs["sms"], np.array(times), *memory, np.ones(2), np.ones((2, 2))
    )
    queries, tokens = np.array(found, dtype=np.int64).T
    limits = Limits(1 << 28, 1 << 28, 1 << 28)
    parts = choose_chunks("measured", 0, queries, tokens, machine, limits)
    for shape in {int(q > TILES[0]) for q, _ in found}:
        mine = (queries > TILES[0]) == (shape == 1)
        priced = [reference_price(found, shape, num_chunks, costs) for num_chunks in NUM_CHUNKS]
        least = min(price for price, _ in priced)
        of_chosen = [
            price
            for price, chunk in priced
            if (np.maximum(1, -(-tokens[mine] // chunk)) == parts[mine]).all()
        ]
        assert of_chosen
        if math.isfinite(least):
            assert min(of_chosen) == pytest.approx(least, rel=1e-12)


def test_a_cut_counts_items_tokens_and_results():
    queries, tokens, tiles = (np.array(x, dtype=np.int64) for x in ([20, 3], [100, 30], [2, 1]))
    # 100 tokens in chunks of 64: two chunks, each read by two tiles; 30 tokens stay whole.
    assert cut_into(queries, tokens, tiles, np.array(64)) == Cut(
        chunk=64, longest=100, items=5, read=230, stored=130, results=40, cut_queries=20, most=2
    )
