"""Both stages against float64 attention, over random forests and outputs filled with NaN.

On the CPU the interpreter runs the kernels; with a GPU, the compiled kernels run the same tests.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attention_checks
from attention_checks import DEVICES, tree_attention
from benchmarks.fuzz.attention_settings import PLANNERS, attention_settings
from benchmarks.fuzz.examples import Example, Runner
from deft_backend import AttentionError, forest_from_page_tables
from deft_backend.forest import build_forest
from deft_backend.planner import PlanError
from deft_backend.planner.encoding import ITEM_ORDER, MERGES
from deft_backend.policies import DeftFlatten, PolicyError
from drawings import check_asked
from random_batches import random_batch, tensors_of
from strategies import Segment, batch_of, grouping_of

OF_ATTENTION = (
    *("num_query_heads", "head_dim", "kv_dtype", "page_size", "max_batch", "query_tokens"),
    "policy",
)


@pytest.fixture(params=DEVICES, scope="module")
def device(request):
    return request.param


def check(batch, **given):
    """The plan of an attention whose result was right."""
    return attention_checks.check(batch, **given).batch.plan


def shapes_of(plan):
    """Tile shapes that have items in a plan."""
    return [shape for shape in sorted(ITEM_ORDER) if len(range(*plan.items_of(shape)))]


def star(requests, shared, own, page_size=1, spare=0):
    """`requests` requests of one prefix; request ``i`` adds ``own[i % len(own)]`` tokens."""
    shared -= shared % page_size
    lens = [shared + own[i % len(own)] for i in range(requests)]
    forest = build_forest(range(requests), [shared] * (requests - 1), lens, page_size)
    return tensors_of(batch_of(forest, requests, page_size, spare))


@pytest.mark.parametrize("planner", PLANNERS)
@settings(max_examples=20)
@given(number=st.integers(0, 419), seed=st.integers(0, 1 << 40))
def test_attention_of_random_batches_is_right(device, planner, number, seed):
    """Any setting of the fuzzer: head shapes, dtypes, layouts, sinks, soft caps, query tokens.

    All KV that no request may read is poison. Rows and pages lie in any order, pages come in two
    copies, requests have grown since the plan.
    """
    dtypes = ("bfloat16", "float16", *(["float32"] if device == "cpu" else []))
    setting = attention_settings(dtypes, large=False)[number]
    assert Runner(torch.device(device)).run(Example(setting, planner, seed, 1, False)) == []


def chunks_and_leaves(shared, chunks, requests, *, halves=False):
    """A `group` of `check`: a prefix of `requests` requests in chunks, and a leaf of each request.

    Other requests have only a leaf. With `halves`, every second chunk is read by each half apart.
    """

    def group(forest, target):
        groups = []
        for n in range(chunks):
            begin, end = n * shared // chunks, (n + 1) * shared // chunks
            half = requests // 2 if halves and n % 2 else requests
            for first in range(0, requests, half):
                rows = list(range(first, first + half))
                groups.append((rows, Segment(0, begin, end, False, 0, len(rows))))
        for row, length in enumerate(forest.seq_lens.tolist()):
            begin = shared if row < requests else 0
            groups.append(([row], Segment(row, begin, length, True, 0, 1)))
        return grouping_of(groups)

    return group


@pytest.mark.parametrize(
    ("policy", "on_device"), [("auto", False), ("auto", True), ("deft-flatten", True)]
)
def test_positions_beyond_15_bits(device, policy, on_device):
    """Prefix, pages and leaves; the last page id is above 2^15, too."""
    batch = star(3, 33_000, [300, 5], spare=1)
    attention_checks.check(batch, device=device, policy=policy, on_device=on_device, grow=1, room=2)


def test_scores_that_overflow_without_a_maximum(device):
    check(random_batch(8, 1, 8), device=device, sm_scale=40.0, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("requests", "shapes"),
    [(2, [0]), (4, [0]), (5, [0, 1]), (32, [0, 1]), (33, [0, 1]), (65, [0, 1])],
)
def test_tile_shapes_and_tails(device, requests, shapes):
    """GQA groups of two heads: 4 or 32 queries in a tile. Ranges that end anywhere in a KV
    block."""
    for shared in (1, 64, 129, 256, 321) if device == "cuda" or requests < 32 else (129, 256):
        batch = star(requests, shared, [1, 64, 31, 65, 257][: 2 + requests % 4], spare=9)
        plan = check(batch, policy="deft-node", device=device, grow=9, own_rows=False)
        assert shapes_of(plan) == shapes


@pytest.mark.parametrize(
    ("page_size", "grow", "shared"),
    [(1, 0, 0), (3, 20, 0), (16, 0, 48), (1, 20, 48), (3, 0, 288), (16, 20, 288)],
)
def test_items_of_several_segments(device, page_size, grow, shared):
    """40 leaves, some empty, and their shared node in one chunk: over 32 ranges and 16 queries."""
    own = [3, 0, 1, 17, 0, 40] if shared else [3, 5, 1, 17, 2, 40]
    batch = star(40, shared, own, page_size, spare=20)
    given = {"device": device, "page_size": page_size, "grow": grow, "own_rows": False}
    plan = check(batch, group=DeftFlatten(1 << 20).group, **given)
    assert shapes_of(plan) == [2]
    ranges, queries = np.diff(plan.item_segment_ptr), np.diff(plan.item_query_ptr)
    # Two tiles of 20 queries; without a shared node each has 20 ranges, else 21.
    assert sorted(queries.tolist()) == [20, 20]
    assert ranges.max() == 20 + (shared > 0)
    plan = check(batch, heads=(2, 2), group=DeftFlatten(1 << 20).group, **given)
    assert sorted(np.diff(plan.item_query_ptr).tolist()) == [40, 40]
    assert np.diff(plan.item_segment_ptr).max() == 32


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter runs one program")
def test_more_merged_queries_than_programs_on_cuda():
    """Each program of stage 2 takes several queries: 150 queries of 32 heads exceed them."""
    group = chunks_and_leaves(600, 10, 150)
    plan = check(star(150, 600, [1, 40]), device="cuda", heads=(32, 8), head_dim=128, group=group)
    assert len(plan.reduce_query) == 150


@pytest.mark.parametrize(
    ("chunks", "logit_cap"), [(1, 3.0), (2, 0.0), (8, 0.0), (8, 3.0), (9, 0.0), (11, 3.0)]
)
def test_results_merged_by_leaves_and_by_stage_2(device, chunks, logit_cap):
    """The leaf's own item merges up to 8 partial results, of any tile shape and odd lengths."""
    group = chunks_and_leaves(600, chunks, 40, halves=True)
    batch = star(40, 600, [0, 1, 90, 300], spare=5)
    # Scores so large that some results weigh much more than those merged before them.
    given = {"grow": 5, "logit_cap": logit_cap, "sm_scale": 1.0, "own_rows": False}
    plan = check(batch, device=device, group=group, **given)
    assert (plan.entry_slot <= MERGES).sum() == (40 if chunks <= 8 else 0)
    assert len(plan.reduce_query) == (40 if chunks > 8 else 0)
    assert len(shapes_of(plan)) == 2


@pytest.mark.parametrize(
    ("policy", "values"),
    [
        *(("deft-node-chunk", values) for values in (0.0, 1e30)),
        *(("deft-flatten", values) for values in (1e30, 1e-30)),
        *(("auto", values) for values in (1e6, 1e30, 1e-6, 1e-30)),
    ],
)
def test_values_of_any_size_survive_their_partial_results(device, policy, values):
    """Partial results have 16 bits: test values beyond float16's range, and very small ones."""
    batch = star(9, 600, [10, 0, 70], spare=3)
    plan = check(batch, policy=policy, device=device, dtype=torch.bfloat16, values=values, grow=3)
    assert plan.num_partials > 0


@pytest.mark.parametrize("policy", ["auto", "deft-node", "deft-node-chunk", "deft-flatten"])
def test_same_batch_gives_equal_bits(device, policy):
    """Equal results in every run, for equal plans, and if unneeded kernels are launched."""
    batch = star(12, 160, [1, 40, 0, 7])
    torch.manual_seed(0)
    q = torch.randn(12, 4, 64).to(device, torch.float16)
    kv = torch.randn(2, batch.num_pages, 2, 64).to(device, torch.float16)
    table, lens = batch.page_table.to(device), batch.seq_lens.to(device)
    results = []
    for _ in range(2):
        attention = tree_attention(dtype=q.dtype, device=device, max_batch=12, policy=policy)
        attention.plan(forest_from_page_tables(batch.page_table, batch.seq_lens))
        for static_launch in (False, False, True):
            attention.poison_workspace()
            results.append(attention.run(q, kv[0], kv[1], table, lens, static_launch=static_launch))
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_tensors_that_do_not_fit_are_refused():
    """Each case changes an attention, or its run over two requests of 75 and 80 tokens."""

    def answer(*words):
        change = {
            name: eval(value, vars(torch)) for name, value in (w.split("=", 1) for w in words)
        }
        made = {name: change.pop(name) for name in OF_ATTENTION if name in change}
        tokens = made.get("query_tokens", 1)
        k_cache, v_cache = torch.zeros(2, 9, 2, 64).to(made.get("kv_dtype", torch.float32))
        tensors = {"q": torch.zeros(2 * tokens, 4, 64), "k_cache": k_cache, "v_cache": v_cache}
        tensors["page_table"] = torch.zeros(2, 80).int()
        tensors["seq_lens"] = torch.tensor([75, 80])
        try:
            attention = tree_attention(**made)
            forest = forest_from_page_tables(np.arange(160).reshape(2, 80), [75, 80])
            attention.plan(forest, query_tokens=tokens)
            attention.run(**(tensors | change))
        except (AttentionError, PolicyError) as error:
            return [str(error)]
        return ["an output"]

    check_asked(Path(__file__).with_name("refused.txt"), answer)


def test_a_plan_of_more_queries_than_the_arrays_hold_is_refused():
    """Its items fit. The plan before stays in use."""
    table = torch.arange(1500, dtype=torch.int32).reshape(5, 300)
    lens = torch.full((5,), 290, dtype=torch.int32)
    attention, large = (tree_attention(policy="deft-node-chunk", max_batch=most) for most in (2, 5))
    torch.manual_seed(0)
    q, caches = torch.randn(2, 4, 64), torch.randn(2, 1500, 2, 64)
    forest = forest_from_page_tables(table, lens)
    plan = large.plan(forest)
    attention.plan(forest_from_page_tables(table[:2], lens[:2]))
    expected = attention.run(q, *caches, table[:2], lens[:2])
    with pytest.raises(PlanError, match="the plan is for 5 queries; its arrays hold 2: raise max_"):
        attention.use(plan, forest)
    assert torch.equal(attention.run(q, *caches, table[:2], lens[:2]), expected)
    forest = forest_from_page_tables(table[:2], lens[:2])
    plan = tree_attention(policy="deft-flatten", max_batch=2).plan(forest)
    with pytest.raises(PlanError, match="policy deft-node-chunk never makes"):
        attention.use(plan, forest)


@pytest.mark.parametrize("on_device", [False, True])
def test_a_batch_smaller_than_the_plan_is_refused(on_device):
    """Its items would read and write beyond the batch."""
    attention = tree_attention(max_batch=4)
    table, lens = torch.tensor([[0, 1], [0, 2], [0, 3]]).int(), torch.tensor([2, 2, 2])

    def plan():
        if on_device:
            attention.plan_batch(table, lens, on_device=True)
        else:
            attention.plan(forest_from_page_tables(table, lens))

    plan()
    q, (k, v) = torch.zeros(3, 4, 64), torch.zeros(2, 9, 2, 64)
    with pytest.raises(AttentionError, match="q is for 2 requests; the plan is for 3"):
        attention.run(q[:2], k, v, table[:2], lens[:2], static_launch=True)
    attention.clear_plan()  # as during the capture of a graph of another size
    attention.run(q[:2], k, v, table[:2], lens[:2], static_launch=True)
    plan()
    attention.run(q, k, v, table, lens, static_launch=True)
    larger = torch.zeros(5, 4, 64)
    with pytest.raises(AttentionError, match=r"5 requests, .*max_batch 4"):
        attention.run(
            larger, k, v, torch.zeros(5, 2).int(), torch.ones(5).long(), static_launch=True
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_beyond_the_plan_stay_as_they_are(dtype):
    """A graph replay may have fewer requests than its capture."""
    attention = tree_attention(dtype=dtype, max_batch=4)
    table, lens = torch.tensor([[0, 1], [0, 2], [0, 0]]).int(), torch.tensor([2, 2, 0])
    attention.plan(forest_from_page_tables(table[:2], lens[:2]))
    q, (k, v) = torch.ones(3, 4, 64, dtype=dtype), torch.ones(2, 9, 2, 64, dtype=dtype)
    assert not attention.run(q, k, v, table, lens, static_launch=True)[2].any()
    out = torch.full_like(q, -5.0)
    attention.run(q, k, v, table, lens, static_launch=True, out=out)
    assert (out[2] == -5.0).all()
    assert (out[:2] == 1.0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_more_results_than_stage_2_reads_at_once(device, dtype):
    """A chain of nodes: the last requests merge a result of each, one block after the other.

    With scores so far apart, each block must rescale the running sums.
    """
    if device == "cuda" and dtype == torch.float32:
        pytest.skip("kernels run float32 on the CPU only")
    ends = np.arange(1, 21) * 5
    batch = tensors_of(batch_of(build_forest(range(20), ends[:-1], ends + 3)))
    plan = check(batch, policy="deft-node", dtype=dtype, device=device, sm_scale=0.5)
    assert np.diff(plan.reduce_ptr).max() > 16


EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("chunks", [1, 3, 9])
@pytest.mark.parametrize(
    ("kv_dtype", "logit_cap"),
    [(None, 0.0), (None, 3.0), (EIGHT_BITS[0], 3.0), (EIGHT_BITS[1], 0.0)],
)
def test_each_way_to_an_output(device, kv_dtype, logit_cap, chunks):
    """Outputs of large tiles, of leaves, of leaves that merge, and of stage 2: one sink each."""
    group = chunks_and_leaves(600, chunks, 20)
    given = {"kv_dtype": kv_dtype, "scales_on_device": kv_dtype is not None}
    given |= {"logit_cap": logit_cap, "sinks": torch.float32, "device": device, "grow": 5}
    plan = check(star(24, 600, [90, 300], spare=5), group=group, **given)
    assert shapes_of(plan) == [0, 1]
    assert (len(plan.reduce_query) > 0) == (chunks > 8)


@pytest.mark.parametrize("kv_dtype", EIGHT_BITS)
def test_every_finite_byte_is_its_number(kv_dtype):
    """One token: its value is the output, whatever its key."""
    numbers = torch.arange(256, dtype=torch.uint8).view(kv_dtype)
    finite = numbers.float().isfinite()
    v = torch.where(finite, numbers.float(), 0.0).to(kv_dtype).reshape(4, 1, 64)
    attention = tree_attention(num_query_heads=1, num_kv_heads=1, kv_dtype=kv_dtype, max_batch=4)
    table, lens = torch.arange(4).int()[:, None], torch.ones(4).int()
    attention.plan(forest_from_page_tables(table, lens))
    out = attention.run(torch.ones(4, 1, 64), v, v, table, lens, k_scale=0.001)
    assert torch.equal(out, v.float())
