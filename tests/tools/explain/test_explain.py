"""Explain's figures against the plan's own loads."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deft_backend.forest import build_forest
from deft_backend.policies import POLICY_NAMES, Target, get_policy
from deft_backend.shapes import MAX_MERGED
from deft_backend.tools.explain import explain, render
from drawings import check_drawn, terminal
from strategies import batches, regular_forest, targets


class Counts(NamedTuple):
    """Loads and stores of a grouping's items, counted without a plan."""

    items: int
    kv_tokens: int
    masked_tokens: int
    queries: int
    partials: int


def counts_by_hand(grouping, target):
    """Cut every group into tiles and items, as docs/how-it-works.md describes."""
    *singles, packed = (rows // target.gqa_group for rows in target.tile_heights)
    items = kv_tokens = masked_tokens = 0
    length = grouping.end - grouping.start
    tiles_of = {}  # a query's items: smallest shape? queries?
    for group in range(grouping.num_groups):
        queries = grouping.queries[slice(*grouping.query_ptr[group : group + 2])].tolist()
        small_too = grouping.least_shape is None or grouping.least_shape[group] == 0
        segments = range(*grouping.segment_ptr[group : group + 2])
        runs = [range(grouping.attend_begin[s], grouping.attend_end[s]) for s in segments]
        plain = runs == [range(len(queries))]
        tiles = -(-len(queries) // (max(singles) if plain else packed))
        for nth in range(tiles):
            tile = range(nth * len(queries) // tiles, (nth + 1) * len(queries) // tiles)
            read = [n for n, run in enumerate(runs) if set(run) & set(tile)]
            for at in range(0, len(read), target.tile_segments[-1]):
                held = read[at : at + target.tile_segments[-1]]
                tokens = [int(length[segments[n]]) for n in held]
                stem = tokens[0] if set(tile) <= set(runs[held[0]]) else 0
                items += 1
                kv_tokens += sum(tokens)
                masked_tokens += 0 if plain else sum(tokens) - stem
                for query in queries[tile.start : tile.stop]:
                    smallest = plain and small_too and len(tile) <= singles[0]
                    tiles_of.setdefault(query, []).append((smallest, len(tile)))
    partials = 0
    for held_by in tiles_of.values():
        small = [queries for smallest, queries in held_by if smallest]
        merges = small == [1] and 1 < len(held_by) <= 1 + MAX_MERGED
        partials += len(held_by) - merges if len(held_by) > 1 else 0
    pairs = sum(map(len, tiles_of.values()))
    return Counts(items, kv_tokens, masked_tokens, pairs, partials)


@pytest.mark.parametrize("name", POLICY_NAMES)
@settings(max_examples=60)
@given(batch=batches(), target=targets, dtype_bytes=st.sampled_from([2, 4]))
def test_figures_are_those_of_the_groups_and_of_the_plan(name, batch, target, dtype_bytes):
    forest, target = batch.forest(), replace(target, dtype_bytes=dtype_bytes)
    grouping = get_policy(name).group(forest, target)
    explanation = explain(forest, grouping, target, num_layers=3)
    counts = counts_by_hand(grouping, target)
    head = target.head_dim * target.dtype_bytes * 3
    token = 2 * head * target.num_kv_heads
    partial = 3 * target.num_query_heads * (target.head_dim * dtype_bytes + 2 * 4)
    assert explanation.num_items == counts.items
    assert explanation.kv_bytes_issued == counts.kv_tokens * token
    assert explanation.kv_bytes_flash_decoding == int(batch.seq_lens.sum()) * token
    if name.startswith("deft"):  # it reads every stored token once
        assert explanation.kv_bytes == forest.tokens_stored * token
    assert explanation.mask_bytes == counts.masked_tokens * 4 * 3 * target.num_kv_heads
    assert explanation.query_bytes == counts.queries * head * target.num_query_heads
    assert explanation.num_partials == counts.partials
    assert explanation.partial_bytes == counts.partials * partial


def test_explanations_are_as_drawn():
    """Cut and shared nodes; more siblings and nodes than are drawn; requests that end inside."""
    console, facts = terminal(120), []
    target = Target(num_query_heads=8, num_kv_heads=2, head_dim=64, num_programs=16)
    wide = build_forest(range(70), [900] * 35 + [300] * 34, [1000 + at for at in range(70)])
    ends = build_forest(range(5), [40, 40, 0, 0], [40, 40, 60, 0, 0])
    for forest, name in (
        (regular_forest([1, 3], [1000, 20]), "deft-node-chunk"),
        (regular_forest([1, 3], [1000, 20]), "deft-flatten"),
        (wide, "flash-decoding"),
        (ends, "auto"),
    ):
        grouping = get_policy(name).group(forest, target)
        explanation = explain(forest, grouping, target, num_layers=3)
        render(explanation, console)
        facts.append(json.dumps(asdict(explanation)))
    text = console.file.getvalue()
    assert "65.36 %" in text  # 1 - 1060 / 3060
    check_drawn("\n".join([text, *facts[:2]]) + "\n", Path(__file__).with_name("explained.ansi"))
