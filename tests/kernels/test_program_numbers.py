"""Programs that number themselves: every number once, and the first ones on different SMs."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_gluon_kernels import emulation, use_gluon  # noqa: F401

import gluon_emulator
from attention_checks import check
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


@pytest.mark.parametrize("seed", range(4))
def test_counters_are_0_after_an_attention(seed, monkeypatch):
    """So the next attention counts from 0 on."""
    made, before_stage_2 = [], []
    stage_2 = REDUCE_PARTIALS.launch

    def prepare(attention):
        use_gluon(attention, 1, 3)
        shape = attention._shapes[1]
        small, large, masked = shape.config.tiles
        tiles = (small, replace(large, programs=64), masked)
        attention._shapes[1] = shape._replace(config=replace(shape.config, tiles=tiles))
        made.append(attention.arrays["arrivals"])

    def launch(*arguments, **options):
        before_stage_2.append(int(made[0][:2].sum()))
        stage_2(*arguments, **options)

    monkeypatch.setattr(REDUCE_PARTIALS, "launch", launch)
    batch = random_batch(seed, 16, 9, longest=300)
    given = {"heads": (4, 1), "page_size": 16, "policy": "deft-node", "static_launch": True}
    attention = check(batch, prepare=prepare, **given)
    begin, end = attention.batch.plan.items_of(1)
    assert 0 < end - begin <= 32, "not a batch of few items; take another seed"
    assert before_stage_2 == [64]
    assert not made[0].any()


@pytest.mark.parametrize("on_device", [False, True])
def test_a_plan_sets_the_counters_to_0(on_device):
    """Whatever a step that was broken off left there."""

    def prepare(attention):
        attention.arrays["arrivals"].fill_(7)

    batch = random_batch(5, 16, 9, longest=300)
    attention = check(batch, page_size=16, on_device=on_device, prepare=prepare)
    assert not attention.arrays["arrivals"].any()
