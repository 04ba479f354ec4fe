"""The masked tile in Gluon without a GPU: DeFT-Flatten in the emulation, against float64."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_gluon_kernels import emulated, launched
from test_query_tokens import drafts, tree_bits

import attention_checks
import gluon_emulator
from deft_backend.kernels.configurations import (
    HOPPER_LARGE_TILE,
    HOPPER_MASKED_TILE,
    HOPPER_SMALL_TILE,
)
from deft_backend.kernels.hopper.large_tile import copies as large_tile_copies
from deft_backend.kernels.hopper.large_tile import kernel as hopper_large_tile
from deft_backend.kernels.hopper.masked_tile import kernel as hopper_masked_tile
from deft_backend.kernels.hopper.masked_tile import segments as masked_tile_segments
from deft_backend.kernels.hopper.small_tile import kernel as hopper_small_tile
from deft_backend.policies.deft_flatten import DeftFlatten

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.fixture(autouse=True, scope="module")
def emulation():
    with pytest.MonkeyPatch.context() as patch:
        for kernel, module in (
            (HOPPER_LARGE_TILE, hopper_large_tile), (HOPPER_MASKED_TILE, hopper_masked_tile),
            (HOPPER_SMALL_TILE, hopper_small_tile),
        ):  # fmt: skip
            patch.setattr(kernel, "launch", emulated(kernel, module))
        yield


def use_gluon(attention, lookahead, programs, query_tokens):
    """Let the kernels in Gluon run the large and the masked tile of an attention on the CPU."""
    shape = attention._shapes[query_tokens]
    small, *others = shape.config.tiles
    changes = {"block_tokens": 64, "num_warps": 4, "programs": programs}
    large, masked = (replace(tile, lookahead=lookahead, **changes) for tile in others)
    config = replace(shape.config, tiles=(small, replace(large, spread=True), masked))
    attention._shapes[query_tokens] = shape._replace(config=config)


def check(
    seed,
    requests,
    query_tokens=1,
    *,
    lookahead=2,
    chunk=128,
    programs=3,
    longest=200,
    is_tree=False,
    ragged=False,
    wide_v=False,
    in_graph=False,
    **given,
):
    def prepare(attention):
        attention._current.policy = DeftFlatten(chunk)
        use_gluon(attention, lookahead, programs, query_tokens)

    batch = drafts(
        seed, requests, given.get("page_size", 1), query_tokens, longest, given.get("grow", 0)
    )
    random = np.random.default_rng(seed)
    launched.clear()
    attention = attention_checks.check(
        batch, query_tokens, policy="deft-flatten", prepare=prepare, static_launch=in_graph,
        tree=tree_bits(seed, requests, query_tokens) if is_tree else None,
        counts=random.integers(0, query_tokens + 1, requests).tolist() if ragged else None,
        layout="V by head" if wide_v else "apart", **{"heads": (4, 1), **given},
    )  # fmt: skip
    begin, end = attention.last_plan.items_of(2)
    assert launched["hopper_masked_tile_attention"] == (begin < end or in_graph)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**31 - 1),
    requests=st.integers(1, 24),
    page_size=st.sampled_from([1, 3, 16]),
    lookahead=st.sampled_from([1, 2, 3]),
    heads=st.sampled_from([(4, 1), (4, 2), (2, 2), (6, 2), (16, 1)]),
    chunk=st.sampled_from([32, 128, 128, 700]),
    grow=st.integers(0, 3),
    programs=st.integers(1, 9),
    own_rows=st.booleans(),
    wide_v=st.booleans(),
    in_graph=st.booleans(),
)
def test_random_forests(**drawn):
    check(**drawn)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31 - 1),
    requests=st.integers(1, 6),
    query_tokens=st.sampled_from([2, 3, 4, 8, 16, 20, 70, 130]),
    page_size=st.sampled_from([1, 3, 16]),
    heads=st.sampled_from([(4, 1), (4, 2), (2, 2), (6, 2), (16, 1)]),
    chunk=st.sampled_from([32, 128, 700]),
    grow=st.integers(0, 3),
    is_tree=st.booleans(),
    ragged=st.booleans(),
)
def test_several_query_tokens(**drawn):
    check(**drawn)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31 - 1),
    requests=st.integers(1, 12),
    query_tokens=st.sampled_from([1, 1, 2, 4]),
    kv_dtype=st.sampled_from(EIGHT_BITS),
    page_size=st.sampled_from([1, 3, 16]),
    lookahead=st.sampled_from([1, 2, 3]),
    heads=st.sampled_from([(4, 1), (4, 2), (2, 2), (6, 2), (16, 1)]),
    head_dim=st.sampled_from([64, 128]),
    logit_cap=st.sampled_from([0.0, 5.0]),
    sinks=st.sampled_from([None, torch.float32]),
    wide_v=st.booleans(),
)
def test_caches_of_eight_bits(**drawn):
    check(**drawn)


@pytest.mark.parametrize("lookahead", [1, 2, 3])
def test_long_chunks_go_round_the_rings(lookahead):
    check(3, 6, lookahead=lookahead, longest=1500, chunk=5000)


@pytest.mark.parametrize("fault", [None, "a copy is not waited for", "spans", "ancestors", "lanes"])
def test_a_fault_shows(fault, monkeypatch):
    """The emulation can fail: without a wait, a mask or a segment, results are wrong."""
    copies, segments, kernel = map(
        gluon_emulator.emulated, (large_tile_copies, masked_tile_segments, hopper_masked_tile)
    )
    if fault == "a copy is not waited for":
        wait = gluon_emulator._MACHINE.wait
        monkeypatch.setattr(copies, "wait_group", lambda outstanding: wait(outstanding + 1))
    elif fault == "spans":
        monkeypatch.setattr(kernel, "in_span", lambda query, span: span[None] + query[:, None] >= 0)
    elif fault == "ancestors":
        rows = kernel.Rows
        monkeypatch.setattr(kernel, "Rows", lambda query, token, bits: rows(query, token + 1, bits))
    elif fault == "lanes":
        from_lane = segments.from_lane
        monkeypatch.setattr(segments, "from_lane", lambda x, lane: from_lane(x, lane * 0))
    if fault is None:
        check(1, 12, 4)
    else:
        with pytest.raises(AssertionError):
            check(1, 12, 4)
