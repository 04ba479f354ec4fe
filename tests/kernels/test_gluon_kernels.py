"""The kernels in Gluon without a GPU: their results in an emulation of their language."""

from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels import chunks_and_leaves, random_batch, star
from test_query_tokens import drafts, tree_bits

import attention_checks
import gluon_emulator
from deft_backend.attention.reference_attention import reference_attention, relative_error
from deft_backend.forest import build_forest
from deft_backend.kernels import configurations
from deft_backend.kernels.hopper import large_tile as hopper_large_tile
from deft_backend.kernels.hopper import large_tile_copies, large_tile_memory, masked_tile_segments
from deft_backend.kernels.hopper import masked_tile as hopper_masked_tile
from deft_backend.kernels.hopper import small_tile as hopper_small_tile
from deft_backend.planner import plan_grouping
from deft_backend.planner.encoding import ARRIVALS
from deft_backend.policies import DeftFlatten
from strategies import Segment, grouping_of

launched = Counter()
"""Launches of each kernel since the last check began."""


def emulated(kernel, module):
    name = kernel._name

    def launch(programs, arguments, constants, *, num_warps, **_):
        given = kernel.named(arguments)
        gluon_emulator.run(module, name, programs, given, constants, num_warps=num_warps)
        launched[name] += 1

    return launch


@pytest.fixture(autouse=True, scope="module")
def emulation():
    with pytest.MonkeyPatch.context() as patch:
        for kernel, module in (
            (configurations.HOPPER_LARGE_TILE, hopper_large_tile),
            (configurations.HOPPER_MASKED_TILE, hopper_masked_tile),
            (configurations.HOPPER_SMALL_TILE, hopper_small_tile),
        ):
            patch.setattr(kernel, "launch", emulated(kernel, module))
        yield


def use_gluon(attention, lookahead, programs, query_tokens=1):
    """Let the kernels in Gluon run an attention on the CPU."""
    shape = attention._shapes[query_tokens]
    small, *others = shape.config.tiles
    block = 32 if attention.kv_dtype in configurations.EXPONENT_BITS else 16
    if small.height <= 16:  # the plain kernel runs taller small tiles, on a GPU too
        small = replace(small, block_tokens=block, lookahead=lookahead, programs=programs)
    changes = {"block_tokens": 64, "num_warps": 4, "programs": 3, "lookahead": lookahead}
    large, masked = (replace(tile, **changes) for tile in others[:2])
    # Of `invariant`, in 16 bits: also in the smallest batches.
    ordered = [replace(small, block_tokens=64, fewest_queries=1)] * len(others[2:])
    config = replace(shape.config, tiles=(small, replace(large, spread=True), masked, *ordered))
    target = replace(shape.target, ordered_from=1)
    attention._shapes[query_tokens] = shape._replace(config=config, target=target)


def check(seed, requests, query_tokens=1, *, lookahead=1, programs=3, longest=300, **given):
    """The attention of a random batch, whose result was right.

    `policy` may be a number: the chunk of DeFT-Flatten, which runs in the masked tile.
    """
    policy = given.pop("policy", "fasttree")
    is_tree, ragged = (given.pop(name, False) for name in ("is_tree", "ragged"))
    flat = isinstance(policy, int)

    def prepare(attention):
        if flat:
            attention.policy = DeftFlatten(policy)
        use_gluon(attention, lookahead, programs, query_tokens)

    page_size, grow = given.get("page_size", 1), given.get("grow", 0)
    if query_tokens == 1:
        batch = random_batch(seed, page_size, requests, longest, grow)
    else:
        batch = drafts(seed, requests, page_size, query_tokens, longest, grow)
    random = np.random.default_rng(seed)
    launched.clear()
    attention = attention_checks.check(
        batch,
        query_tokens,
        prepare=prepare,
        tree=tree_bits(seed, requests, query_tokens) if is_tree else None,
        counts=random.integers(0, query_tokens + 1, requests).tolist() if ragged else None,
        policy="deft-flatten" if flat else policy,
        **{"heads": (4, 1), **given},
    )
    if flat:
        begin, end = attention.batch.plan.items_of(2)
        has_items = begin < end or given.get("static_launch", False)
        assert launched["hopper_masked_tile_attention"] == has_items


POLICIES = ("auto", "fasttree", "deft-node", "deft-node-chunk", "flash-decoding")
FLAGS = ("own_rows", "heads_first", "static_launch", "is_tree", "ragged", "scales_on_device")


@pytest.mark.parametrize("given", [{"heads": (2, 2)}, {"sinks": torch.float32}, {"logit_cap": 5.0}])
def test_ordered_tiles(given):
    """Only on a GPU can `benchmarks invariant` tell whether they have the large tile's bits."""
    check(7, 6, **given, policy="invariant", page_size=16, longest=1500)
    assert launched["hopper_small_tile_attention"] == 2  # also as the ordered tile


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn, torch.float8_e5m2])
@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**31 - 1),
    requests=st.integers(1, 24),
    query_tokens=st.sampled_from([1, 1, 1, 1, 2, 3, 4, 8, 16, 20, 70, 130]),
    page_size=st.sampled_from([1, 3, 16]),
    lookahead=st.sampled_from([1, 2, 3]),
    heads=st.sampled_from([(4, 1), (4, 2), (2, 2), (6, 2), (16, 1)]),
    head_dim=st.sampled_from([64, 64, 128]),
    policy=st.sampled_from([*POLICIES, 32, 128, 700]),
    grow=st.integers(0, 3),
    programs=st.integers(1, 9),
    logit_cap=st.sampled_from([0.0, 5.0]),
    sinks=st.sampled_from([None, torch.float32]),
    flags=st.fixed_dictionaries(dict.fromkeys(FLAGS, st.booleans())),
)
def test_random_batches(kv_dtype, requests, query_tokens, heads, policy, flags, **drawn):
    """Chains and trees, for every tile that the query tokens of a request fill.

    A block as long as a tile has rows lets Q share a V block's memory. Chunks of 128 tokens end
    with one of fewer tokens than a request has query tokens. A graph launches all kernels, even
    those without items in the plan.
    """
    for name, possible in (
        ("is_tree", query_tokens > 1),
        ("ragged", query_tokens > 1),
        ("scales_on_device", kv_dtype is not None),
    ):
        flags[name] &= possible
    requests = requests if query_tokens == 1 else 1 + requests // 4
    kind = {"heads": heads, "policy": policy, "kv_dtype": kv_dtype, **flags, **drawn}
    check(requests=requests, query_tokens=query_tokens, longest=260, **kind)
    small = query_tokens * heads[0] // heads[1] <= 16 and not flags["static_launch"]
    if policy == "flash-decoding" and small:
        assert launched == {"hopper_small_tile_attention": 1}


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("requests", "heads"), [(2, 40), (12, 4)])
def test_an_empty_leaf_at_the_end_of_a_full_row(requests, heads, page_size):
    """Large tiles read no page behind the table, whether they read the leaf or only prefetch for
    it."""
    table = torch.arange(48 // page_size, dtype=torch.int32).repeat(requests, 1)
    batch = attention_checks.Batch(table, torch.full((requests,), 48).int(), 48 // page_size)
    attention_checks.check(
        batch,
        heads=(heads, 1),
        page_size=page_size,
        policy="deft-node",
        prepare=lambda attention: use_gluon(attention, 2, 3),
    )


@pytest.mark.parametrize("policy", ["fasttree", 5000])
@pytest.mark.parametrize("lookahead", [1, 2, 3, 4])
def test_long_segments_go_round_the_rings(lookahead, policy):
    check(3, 6, lookahead=lookahead, longest=1500, policy=policy)


@pytest.mark.parametrize("policy", ["fasttree", 128])
@pytest.mark.parametrize("query_tokens", [70, 130])
def test_trees_of_more_tokens_than_a_word_has_bits(query_tokens, policy):
    check(1, 2, query_tokens, is_tree=True, policy=policy, longest=100)


@pytest.mark.parametrize("module", [large_tile_copies, hopper_small_tile])
@pytest.mark.parametrize("late", [0, 1])
def test_a_copy_that_is_not_waited_for_shows(late, module, monkeypatch):
    """The emulation can fail: if one more group of copies is in flight, the products read NaN."""
    wait = gluon_emulator._MACHINE.wait
    copy = gluon_emulator.emulated(module)
    monkeypatch.setattr(copy, "wait_group", lambda outstanding: wait(outstanding + late))
    with pytest.raises(AssertionError) if late else nullcontext():
        check(1, 12)


@pytest.mark.parametrize("fault", [None, "a copy is not waited for", "spans", "ancestors", "lanes"])
def test_a_fault_of_the_masked_tile_shows(fault, monkeypatch):
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
    with pytest.raises(AssertionError) if fault else nullcontext():
        check(1, 12, 4, lookahead=2, longest=200, policy=128)


@pytest.mark.parametrize(
    ("group", "merged"),
    [(group, merged) for group in (1, 4, 12) for merged in (1, 2, 3, 5, 8)]
    + [(2, 8), (3, 5), (7, 3)],
)
def test_leaves_merge_any_number_of_results(merged, group):
    """A prefix of several nodes that all requests share, and a leaf for each request."""
    requests = 5 if group > 1 else 11  # more than a small tile holds
    shared, own = 16 * merged, 21

    attention = attention_checks.check(
        star(requests, shared, [own]),
        heads=(2 * group, 2),
        group=chunks_and_leaves(shared, merged, requests),
        prepare=lambda attention: use_gluon(attention, 1, 4),
    )
    assert len(attention.batch.plan.reduce_query) == 0  # leaves merge


@pytest.mark.parametrize("group", [4, 5])
@pytest.mark.parametrize("longer", [[1, 2, 5], list(range(7))])
def test_a_stem_writes_outputs_and_partial_results(group, longer):
    """Of one tile, not full: some queries have read all their KV by then, others have not.

    Where all have tokens of their own, those of the stem are as large as float16 has them: partial
    results stay finite, though rounded weights may weigh more than one.
    """
    requests, shared, own, heads, dim = 7, 100, 9, (2 * group, 2), 64
    generator = torch.Generator().manual_seed(group)
    lens = torch.full((requests,), shared, dtype=torch.int32)
    lens[longer] = shared + own
    table = torch.arange(shared, shared + requests * own, dtype=torch.int32).reshape(requests, own)
    table = torch.cat([torch.arange(shared).int().expand(requests, -1), table], dim=1)
    q = torch.randn(requests, heads[0], dim, generator=generator).half()
    slots = shared + requests * own
    k_cache, v_cache = torch.randn(2, slots, 1, heads[1], dim, generator=generator).half()
    if len(longer) == requests:
        k_cache[: shared - 1] = k_cache[0]  # one weight, rounded 99 times
        v_cache[:shared], v_cache[shared:] = torch.finfo(torch.float16).max, 0.0
    shape = {"num_query_heads": heads[0], "num_kv_heads": heads[1], "max_batch": requests}
    attention = attention_checks.tree_attention(**shape, dtype=torch.float16)
    use_gluon(attention, 2, 3)
    order = [r for r in range(requests) if r not in longer] + longer
    forest = build_forest(order, [shared] * (requests - 1), lens.tolist())
    leaves = [([request], Segment(request, shared, shared + own, True, 0, 1)) for request in longer]
    groups = [(range(requests), Segment(0, 0, shared, False, 0, requests)), *leaves]
    plan = plan_grouping(grouping_of(groups), forest, attention.target)
    stem = plan.entry_slot[:requests]
    assert (stem < 0).sum() == requests - len(longer)
    attention.use(plan, forest)
    attention.poison_workspace()
    out = attention.run(q, k_cache, v_cache, table.contiguous(), lens)
    assert relative_error(out, reference_attention(q, k_cache, v_cache, table, lens)) <= 1e-3


# Programs that number themselves: every number once, and the first ones on different SMs


def numbers(sms, counted, asked, stale=0):
    """Each program's number. Programs count in one order and ask in another."""
    module = gluon_emulator.emulated(large_tile_memory)
    memory = torch.zeros(ARRIVALS, dtype=torch.int32)
    memory[2:] = stale
    arrivals = gluon_emulator._argument(memory)
    machine = gluon_emulator._MACHINE
    machine.programs, machine.warps, machine.sms = len(sms), 4, sms
    layout = type("Layout", (), {"each": None})
    held, found = {}, [-1] * len(sms)
    for program in counted:
        machine.program = program
        held[program] = module.count_on_sm(arrivals, layout)
    for program in asked:
        machine.program = program
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
    stage_2 = configurations.REDUCE_PARTIALS.launch

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

    monkeypatch.setattr(configurations.REDUCE_PARTIALS, "launch", launch)
    batch = random_batch(seed, 16, 9, longest=300)
    given = {"heads": (4, 1), "page_size": 16, "policy": "deft-node", "static_launch": True}
    attention = attention_checks.check(batch, prepare=prepare, **given)
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
    attention = attention_checks.check(batch, page_size=16, on_device=on_device, prepare=prepare)
    assert not attention.arrays["arrivals"].any()
