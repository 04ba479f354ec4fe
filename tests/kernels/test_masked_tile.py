"""The masked tile in Gluon without a GPU: DeFT-Flatten in the emulation, against float64."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_gluon_kernels import BLOCKS, BYTES, FORESTS, emulation, launched  # noqa: F401
from test_gluon_kernels import check as check_gluon

import gluon_emulator
from deft_backend.kernels.hopper import large_tile_copies, masked_tile_segments
from deft_backend.kernels.hopper import masked_tile as hopper_masked_tile


def check(*batch, lookahead=2, chunk=128, longest=200, static_launch=False, **given):
    attention = check_gluon(
        *batch,
        lookahead=lookahead,
        chunk=chunk,
        longest=longest,
        static_launch=static_launch,
        **given,
    )
    begin, end = attention.last_plan.items_of(2)
    assert launched["hopper_masked_tile_attention"] == (begin < end or static_launch)


@settings(max_examples=30)
@given(**FORESTS, chunk=st.sampled_from([32, 128, 128, 700]))
def test_random_forests(**drawn):
    check(**drawn)


@settings(max_examples=25)
@given(**BLOCKS, chunk=st.sampled_from([32, 128, 700]))
def test_several_query_tokens(**drawn):
    check(**drawn)


@settings(max_examples=25)
@given(**BYTES)
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
