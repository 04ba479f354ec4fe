"""Programs that number themselves: every number once, and the first ones on different SMs."""

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_gluon_kernels import emulation, use_gluon  # noqa: F401

import gluon_emulator
from attention_checks import tree_attention
from deft_backend import TreeAttention, forest_from_page_tables
from deft_backend.attention.reference_attention import reference_attention, relative_error
from deft_backend.kernels.configurations import REDUCE_PARTIALS
from deft_backend.kernels.hopper import large_tile_memory
from deft_backend.planner.encoding import ARRIVALS
from random_batches import random_batch

MACHINE = gluon_emulator._MACHINE


@pytest.fixture(autouse=True)
def machine():
    held = MACHINE.program, MACHINE.programs, MACHINE.warps, MACHINE.sms
    yield
    MACHINE.program, MACHINE.programs, MACHINE.warps, MACHINE.sms = held


def numbers(sms, counted, asked, stale=0):
    """Each program's number. Programs count in one order and ask in another."""
    module = gluon_emulator.emulated(large_tile_memory)
    memory = torch.zeros(ARRIVALS, dtype=torch.int32)
    memory[2:] = stale
    arrivals = gluon_emulator._argument(memory)
    MACHINE.programs, MACHINE.warps, MACHINE.sms = len(sms), 4, sms
    layout = type("Layout", (), {"each": None})
    held, found = {}, [-1] * len(sms)
    for program in counted:
        MACHINE.program = program
        held[program] = module.count_on_sm(arrivals, layout)
    for program in asked:
        MACHINE.program = program
        found[program] = int(module.spread_number(arrivals, held[program], layout))
    return found


@given(
    data=st.data(),
    programs=st.integers(1, 60),
    sms=st.sampled_from([1, 3, 30, 60, 700]),
    stale=st.sampled_from([0, 0, 2]),
)
def test_every_number_is_one_programs(data, programs, sms, stale):
    """Wherever the programs lie, also with more SMs than there are counters.

    A host plan without partial results has no stage 2, which would set the counters to 0.
    """
    places = data.draw(
        st.lists(st.integers(0, sms - 1), min_size=programs, max_size=programs), "SMs"
    )
    counted = data.draw(st.permutations(range(programs)), "order of counting")
    asked = data.draw(st.permutations(range(programs)), "order of asking")
    found = numbers(places, counted, asked, stale)
    assert sorted(found) == list(range(programs))
    if sms <= ARRIVALS - 2 and not stale:
        used = len(set(places))
        first = {places[program] for program in range(programs) if found[program] < used}
        assert len(first) == used


class Attended(NamedTuple):
    """An attention over a random batch."""

    attention: TreeAttention
    table: torch.Tensor
    lens: torch.Tensor
    num_pages: int

    @property
    def arrivals(self):
        return self.attention.arrays["arrivals"]

    def plan(self):
        return self.attention.plan(forest_from_page_tables(self.table, self.lens, 16))


def attended(seed, policy):
    attention = tree_attention(
        num_kv_heads=1, dtype=torch.float16, page_size=16, max_batch=9, policy=policy
    )
    return Attended(attention, *random_batch(seed, 16, 9, longest=300))


@pytest.mark.parametrize("seed", range(4))
def test_counters_are_0_after_an_attention(seed, monkeypatch):
    """So the next attention counts from 0 on."""
    given = attended(seed, "deft-node")
    attention, arrivals = given.attention, given.arrivals
    use_gluon(attention, 1, 3)
    shape = attention._shapes[1]
    small, large, masked = shape.config.tiles
    tiles = (small, replace(large, programs=64), masked)
    attention._shapes[1] = shape._replace(config=replace(shape.config, tiles=tiles))
    begin, end = given.plan().items_of(1)
    assert 0 < end - begin <= 32, "not a batch of few items; take another seed"
    before_stage_2 = []
    stage_2 = REDUCE_PARTIALS.launch

    def launch(*arguments, **options):
        before_stage_2.append(int(arrivals[:2].sum()))
        stage_2(*arguments, **options)

    monkeypatch.setattr(REDUCE_PARTIALS, "launch", launch)
    q = torch.randn(9, 4, 64).half()
    k_cache, v_cache = torch.randn(2, given.num_pages, 16, 1, 64).half()
    expected = reference_attention(q, k_cache, v_cache, given.table, given.lens)
    for _ in range(2):
        attention.poison_workspace()
        out = attention.run(q, k_cache, v_cache, given.table, given.lens, static_launch=True)
        assert relative_error(out, expected) <= 1e-3
        assert not arrivals.any()
    assert before_stage_2 == [64, 64]


@pytest.mark.parametrize("planner", ["host", "device"])
def test_a_plan_sets_the_counters_to_0(planner):
    """Whatever a step that was broken off left there."""
    given = attended(5, "auto")
    given.arrivals.fill_(7)
    if planner == "device":
        given.attention.plan_batch(given.table, given.lens, on_device=True)
    else:
        given.plan()
    assert not given.arrivals.any()
