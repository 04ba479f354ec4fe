"""The kernels in Gluon without a GPU: their results in an emulation of their language."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_query_tokens import drafts, tree_bits

import gluon_emulator
from benchmarks.random_batches import random_batch
from deft_backend import TreeAttention, forest_from_page_tables
from deft_backend.attention.reference_attention import reference_attention, relative_error
from deft_backend.kernels import configurations
from deft_backend.kernels.configurations import HOPPER_LARGE_TILE, HOPPER_SMALL_TILE
from deft_backend.kernels.hopper.large_tile import copies as large_tile_copies
from deft_backend.kernels.hopper.large_tile import kernel as hopper_large_tile
from deft_backend.kernels.hopper.small_tile import kernel as hopper_small_tile

launched = Counter()
"""Launches of each kernel since the test began."""


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
        patch.setattr(configurations, "GLUON_QUERY_TOKENS", True)
        patch.setattr(configurations, "GLUON_EIGHT_BITS", True)
        for kernel, module in (
            (HOPPER_LARGE_TILE, hopper_large_tile), (HOPPER_SMALL_TILE, hopper_small_tile),
        ):  # fmt: skip
            patch.setattr(kernel, "launch", emulated(kernel, module))
        yield


def use_gluon(attention, lookahead, programs, query_tokens=1):
    """Let the kernels in Gluon run an attention on the CPU."""
    shape = attention._shapes[query_tokens]
    small, large, masked = shape.config.tiles
    block = 32 if attention.kv_dtype in configurations.EXPONENT_BITS else 16
    if small.height <= 16:  # the plain kernel runs taller small tiles, on a GPU too
        small = replace(small, block_tokens=block, lookahead=lookahead, programs=programs)
    large = replace(
        large, block_tokens=64, lookahead=lookahead, num_warps=4, programs=3, spread=True
    )
    config = replace(shape.config, tiles=(small, large, masked))
    attention._shapes[query_tokens] = shape._replace(config=config)


def check(
    seed,
    requests,
    page_size=1,
    lookahead=1,
    logit_cap=0.0,
    heads=(4, 1),
    head_dim=64,
    grow=0,
    policy="fasttree",
    programs=3,
    longest=300,
    own_rows=True,
    wide_v=False,
    in_graph=False,
):
    batch = random_batch(seed, requests, page_size, longest=longest, spare=grow)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(torch.float16)

    q = normal(requests, heads[0], head_dim)
    k_cache, v_cache = normal(2, batch.num_pages, page_size, heads[1], head_dim)
    if wide_v:  # other strides than K's
        v_cache = torch.cat([v_cache, v_cache], dim=2)[:, :, : heads[1]]
    attention = TreeAttention(
        num_query_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, dtype=torch.float16,
        device="cpu", page_size=page_size, max_batch=requests, policy=policy,
    )  # fmt: skip
    use_gluon(attention, lookahead, programs)
    table, lens = torch.from_numpy(batch.page_table), torch.from_numpy(batch.seq_lens)
    attention.plan(forest_from_page_tables(table, lens, page_size, num_pages=batch.num_pages))
    attention.poison_workspace()
    out = torch.full_like(q, float("nan"))
    rows, held = None, table
    if not own_rows:
        rows = torch.randperm(requests, generator=generator)
        held = torch.empty_like(table)
        held[rows] = table
    attention.run(
        q, k_cache, v_cache, held, lens + grow, table_rows=rows, logit_cap=logit_cap, out=out,
        static_launch=in_graph,
    )  # fmt: skip
    expected = reference_attention(q, k_cache, v_cache, table, lens + grow, logit_cap=logit_cap)
    assert out.isfinite().all()
    assert relative_error(out, expected) <= 1e-3


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**31 - 1),
    requests=st.integers(1, 24),
    page_size=st.sampled_from([1, 3, 16]),
    lookahead=st.sampled_from([1, 2, 3]),
    heads=st.sampled_from([(4, 1), (4, 2), (2, 2), (6, 2), (16, 1)]),
    grow=st.integers(0, 3),
    policy=st.sampled_from(["auto", "fasttree", "deft-node", "flash-decoding"]),
    programs=st.integers(1, 9),
    own_rows=st.booleans(),
    wide_v=st.booleans(),
    in_graph=st.booleans(),
)
def test_random_forests(
    seed, requests, page_size, lookahead, heads, grow, policy, programs, own_rows, wide_v, in_graph
):
    """A block as long as a tile has rows lets Q share a V block's memory.

    A graph launches all kernels, even those without items in the plan.
    """
    check(
        seed, requests, page_size, lookahead, heads=heads, grow=grow, policy=policy,
        programs=programs, longest=260, own_rows=own_rows, wide_v=wide_v, in_graph=in_graph,
    )  # fmt: skip


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31 - 1),
    requests=st.integers(1, 6),
    query_tokens=st.sampled_from([2, 3, 4, 8, 16, 20, 70, 130]),
    page_size=st.sampled_from([1, 3, 16]),
    lookahead=st.sampled_from([1, 2, 3]),
    heads=st.sampled_from([(4, 1), (4, 2), (2, 2), (6, 2), (16, 1)]),
    grow=st.integers(0, 3),
    policy=st.sampled_from(["auto", "fasttree", "deft-node", "flash-decoding"]),
    is_tree=st.booleans(),
    ragged=st.booleans(),
)
@example(
    seed=1, requests=2, query_tokens=70, page_size=16, lookahead=2, heads=(4, 1), grow=0,
    policy="auto", is_tree=True, ragged=False,
)  # fmt: skip
@example(
    seed=2, requests=1, query_tokens=130, page_size=3, lookahead=1, heads=(2, 2), grow=1,
    policy="deft-node", is_tree=True, ragged=True,
)  # fmt: skip
def test_several_query_tokens(
    seed, requests, query_tokens, page_size, lookahead, heads, grow, policy, is_tree, ragged
):
    """Chains and trees, for every tile that the query tokens of a request fill."""
    batch = drafts(seed, requests, page_size, query_tokens, longest=260, spare=grow)
    random = np.random.default_rng(seed)
    counts = [query_tokens] * requests
    start = None
    if ragged:
        counts = random.integers(0, query_tokens + 1, requests).tolist()
        start = torch.tensor([0, *np.cumsum(counts).tolist()], dtype=torch.int32)
    bits = tree_bits(seed, requests, query_tokens) if is_tree else None
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(sum(counts), heads[0], 64, generator=generator).half()
    shape = (2, batch.num_pages, page_size, heads[1], 64)
    k_cache, v_cache = torch.randn(shape, generator=generator).half()
    attention = TreeAttention(
        num_query_heads=heads[0], num_kv_heads=heads[1], head_dim=64, dtype=torch.float16,
        device="cpu", page_size=page_size, max_batch=requests, policy=policy,
        query_tokens=query_tokens,
    )  # fmt: skip
    use_gluon(attention, lookahead, 3, query_tokens)
    table, lens = batch.page_table, batch.seq_lens
    attention.plan(forest_from_page_tables(table, lens, page_size), query_tokens=query_tokens)
    attention.poison_workspace()
    out = torch.full_like(q, float("nan"))
    attention.run(
        q, k_cache, v_cache, table, lens + grow, query_start=start, ancestors=bits, out=out
    )
    expected = reference_attention(
        q, k_cache, v_cache, table, lens + grow, query_start=start, ancestors=bits
    )
    assert out.isfinite().all()
    assert relative_error(out, expected) <= 1e-3


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31 - 1),
    requests=st.integers(1, 12),
    query_tokens=st.sampled_from([1, 1, 2, 4]),
    kv_dtype=st.sampled_from([torch.float8_e4m3fn, torch.float8_e5m2]),
    page_size=st.sampled_from([1, 3, 16]),
    lookahead=st.sampled_from([1, 2, 3]),
    heads=st.sampled_from([(4, 1), (4, 2), (2, 2), (6, 2), (16, 1)]),
    head_dim=st.sampled_from([64, 128]),
    logit_cap=st.sampled_from([0.0, 5.0]),
    policy=st.sampled_from(["auto", "deft-node", "flash-decoding"]),
    scales=st.sampled_from(["none", "numbers", "tensors"]),
    sinks=st.booleans(),
    wide_v=st.booleans(),
)
def test_caches_of_eight_bits(
    seed,
    requests,
    query_tokens,
    kv_dtype,
    page_size,
    lookahead,
    heads,
    head_dim,
    logit_cap,
    policy,
    scales,
    sinks,
    wide_v,
):
    batch = drafts(seed, requests, page_size, query_tokens, longest=200)
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(requests * query_tokens, heads[0], head_dim, generator=generator).half()
    shape = (2, batch.num_pages, page_size, heads[1], head_dim)
    k_cache, v_cache = torch.randn(shape, generator=generator).to(kv_dtype)
    if wide_v:  # other strides than K's
        v_cache = torch.cat([v_cache, v_cache], dim=2)[:, :, : heads[1]]
    attention = TreeAttention(
        num_query_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, dtype=torch.float16,
        device="cpu", page_size=page_size, max_batch=requests, policy=policy, kv_dtype=kv_dtype,
        query_tokens=query_tokens,
    )  # fmt: skip
    use_gluon(attention, lookahead, 3, query_tokens)
    table, lens = batch.page_table, batch.seq_lens
    attention.plan(forest_from_page_tables(table, lens, page_size), query_tokens=query_tokens)
    attention.poison_workspace()
    given = {"logit_cap": logit_cap}
    if sinks:
        given["sinks"] = torch.randn(heads[0], generator=generator)
    factors = {"none": (1.0, 1.0), "numbers": (0.5, 3.0), "tensors": (0.5, 3.0)}[scales]
    k, v = ((x.float() * s).double() for x, s in zip((k_cache, v_cache), factors, strict=True))
    expected = reference_attention(q.double(), k, v, table, lens, **given)
    if scales == "numbers":
        given |= dict(zip(("k_scale", "v_scale"), factors, strict=True))
    elif scales == "tensors":
        given["k_scale"], given["v_scale"] = (torch.tensor([factor]) for factor in factors)
    launched.clear()
    out = torch.full_like(q, float("nan"))
    attention.run(q, k_cache, v_cache, table, lens, out=out, **given)
    if policy == "flash-decoding" and query_tokens * heads[0] // heads[1] <= 16:
        assert launched == {"hopper_small_tile_attention": 1}
    assert out.isfinite().all()
    assert relative_error(out, expected) <= 1e-3


@pytest.mark.parametrize(
    ("heads", "head_dim", "logit_cap"), [((8, 2), 128, 0.0), ((8, 2), 128, 20.0), ((4, 1), 64, 5.0)]
)
def test_head_dimensions_and_soft_caps(heads, head_dim, logit_cap):
    launched.clear()
    check(1, 12, 16, heads=heads, head_dim=head_dim, logit_cap=logit_cap)
    assert launched == {"hopper_large_tile_attention": 1, "hopper_small_tile_attention": 1}


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize(("requests", "heads"), [(2, 40), (12, 4)])
def test_an_empty_leaf_at_the_end_of_a_full_row(requests, heads, page_size):
    """Large tiles read no page behind the table, whether they read the leaf or only prefetch for
    it."""
    table = torch.arange(48 // page_size, dtype=torch.int32).repeat(requests, 1)
    lens = torch.full((requests,), 48, dtype=torch.int32)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(requests, heads, 64, generator=generator).half()
    caches = torch.randn(2, 48 // page_size, page_size, 1, 64, generator=generator).half()
    attention = TreeAttention(
        num_query_heads=heads, num_kv_heads=1, head_dim=64, dtype=torch.float16, device="cpu",
        page_size=page_size, max_batch=requests, policy="deft-node",
    )  # fmt: skip
    use_gluon(attention, 2, 3)
    attention.plan(forest_from_page_tables(table, lens, page_size, num_pages=48 // page_size))
    out = attention.run(q, *caches, table, lens)
    assert relative_error(out, reference_attention(q, *caches, table, lens)) <= 1e-3


@pytest.mark.parametrize("lookahead", [1, 2, 3, 4])
def test_long_segments_go_round_the_rings(lookahead):
    check(3, 6, lookahead=lookahead, longest=1500)


@pytest.mark.parametrize("module", [large_tile_copies, hopper_small_tile])
@pytest.mark.parametrize("late", [0, 1])
def test_a_copy_that_is_not_waited_for_shows(late, module, monkeypatch):
    """The emulation can fail: if one more group of copies is in flight, the products read NaN."""
    wait = gluon_emulator._MACHINE.wait
    copy = gluon_emulator.emulated(module)
    monkeypatch.setattr(copy, "wait_group", lambda outstanding: wait(outstanding + late))
    if late:
        with pytest.raises(AssertionError):
            check(1, 12)
    else:
        check(1, 12)


@pytest.mark.parametrize(
    ("group", "merged"),
    [(group, merged) for group in (1, 4, 12) for merged in (1, 2, 3, 5, 8)]
    + [(2, 8), (3, 5), (7, 3)],
)
def test_leaves_merge_any_number_of_results(merged, group):
    """A prefix of several nodes that all requests share, and a leaf for each request."""
    from deft_backend.forest import build_forest
    from deft_backend.planner import plan_grouping
    from deft_backend.policies import GroupingBuilder, Segment

    requests = 5 if group > 1 else 11  # more than a small tile holds
    shared, own, heads, dim = 16 * merged, 21, (2 * group, 2), 64
    generator = torch.Generator().manual_seed(merged)
    slots = shared + requests * own
    table = torch.randperm(slots, generator=generator, dtype=torch.int32)
    table = torch.cat(
        [table[:shared].expand(requests, -1), table[shared:].reshape(requests, own)], dim=1
    )
    lens = torch.full((requests,), shared + own, dtype=torch.int32)
    q = torch.randn(requests, heads[0], dim, generator=generator).half()
    k_cache, v_cache = torch.randn(2, slots, 1, heads[1], dim, generator=generator).half()
    attention = TreeAttention(
        num_query_heads=heads[0], num_kv_heads=heads[1], head_dim=dim, dtype=torch.float16,
        device="cpu", max_batch=requests,
    )  # fmt: skip
    use_gluon(attention, 1, 4)
    forest = build_forest(range(requests), [shared] * (requests - 1), lens.tolist())
    builder = GroupingBuilder()
    everyone = list(range(requests))
    for begin in range(0, shared, 16):
        builder.add(everyone, [Segment(0, begin, begin + 16, False, 0, requests)])
    for request in everyone:
        builder.add([request], [Segment(request, shared, shared + own, True, 0, 1)])
    plan = plan_grouping(builder.build(), forest, attention.target)
    assert len(plan.reduce_query) == 0  # leaves merge
    attention.use(plan, forest)
    attention.poison_workspace()
    out = attention.run(q, k_cache, v_cache, table.contiguous(), lens)
    assert relative_error(out, reference_attention(q, k_cache, v_cache, table, lens)) <= 1e-3


@pytest.mark.parametrize("group", [4, 5])
@pytest.mark.parametrize("longer", [[1, 2, 5], list(range(7))])
def test_a_stem_writes_outputs_and_partial_results(group, longer):
    """Of one tile, not full: some queries have read all their KV by then, others have not.

    Where all have tokens of their own, those of the stem are as large as float16 has them: partial
    results stay finite, though rounded weights may weigh more than one.
    """
    from deft_backend.forest import build_forest
    from deft_backend.planner import plan_grouping
    from deft_backend.policies import GroupingBuilder, Segment

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
    attention = TreeAttention(
        num_query_heads=heads[0], num_kv_heads=heads[1], head_dim=dim, dtype=torch.float16,
        device="cpu", max_batch=requests,
    )  # fmt: skip
    use_gluon(attention, 2, 3)
    order = [r for r in range(requests) if r not in longer] + longer
    forest = build_forest(order, [shared] * (requests - 1), lens.tolist())
    builder = GroupingBuilder()
    builder.add(list(range(requests)), [Segment(0, 0, shared, False, 0, requests)])
    for request in longer:
        builder.add([request], [Segment(request, shared, shared + own, True, 0, 1)])
    plan = plan_grouping(builder.build(), forest, attention.target)
    stem = plan.entry_slot[:requests]
    assert (stem < 0).sum() == requests - len(longer)
    attention.use(plan, forest)
    attention.poison_workspace()
    out = attention.run(q, k_cache, v_cache, table.contiguous(), lens)
    assert relative_error(out, reference_attention(q, k_cache, v_cache, table, lens)) <= 1e-3
