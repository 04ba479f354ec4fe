"""The device planner in the interpreter: the same attention as the reference's `auto`."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._pytree import tree_leaves, tree_map

from attention_checks import tree_attention
from deft_backend.attention import AttentionError
from deft_backend.compile.triton_kernel import Kernel
from deft_backend.costs import FastTreeCoefficients
from deft_backend.forest import build_forest
from deft_backend.planner import DevicePlan, PlanCapacity, plan_forest
from deft_backend.planner.on_device import DevicePlanner, largest_batch
from deft_backend.planner.on_device import planner as planner_module
from deft_backend.planner.on_device.launch_numbers import ProgramWork
from deft_backend.policies import (
    POLICIES,
    Auto,
    DeftFlatten,
    FastTree,
    Invariant,
    PolicyError,
    Target,
)
from deft_backend.policies.grouping import longest_first
from deft_backend.shapes import MAX_ITEM_TOKENS, MAX_MERGED
from examples.walkthrough import read_plan
from made_kernels import noted_launches
from strategies import GROWTH, Batch, batch_of, batches, check_plan, regular_forest, targets

CPU = torch.device("cpu")
AUTO = Auto()
TARGET = Target(num_query_heads=8, num_kv_heads=2, head_dim=64, block_tokens=16)


def planner_for(target, batch, page_size, capacity=None, device=CPU, policy=AUTO):
    plan = DevicePlan(capacity or PlanCapacity.for_batch(batch), device)
    overlapped = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return DevicePlanner(target, policy, plan, device, page_size, overlapped=overlapped), plan


def plan_of(batch, target=TARGET, capacity=None, device=CPU, policy=AUTO):
    requests = len(batch.seq_lens)
    planner, plan = planner_for(target, max(1, requests), batch.page_size, capacity, device, policy)
    for tensor in plan["segment_request"], plan["entry_slot"], plan["item_query_ptr"]:
        tensor.fill_(-(1 << 20))  # any earlier content
    tables = torch.from_numpy(np.ascontiguousarray(batch.page_tables))
    rows = torch.arange(requests, dtype=torch.int32, device=device)
    planner.plan(tables.to(device), rows, torch.from_numpy(batch.seq_lens).to(device))
    return read_plan(plan)


def items_of(plan):
    """Queries and ranges of every item, for any choice of the request that holds a range."""
    segments = list(zip(plan.segment_start.tolist(), plan.segment_end.tolist(), strict=True))
    masked = int(plan.tile_ptr[-2])
    spans = plan.segment_span.tolist()
    return Counter(
        (int(queries), *segments[begin:end], *(spans[begin:end] if number >= masked else ()))
        for number, (queries, begin, end) in enumerate(
            zip(
                np.diff(plan.item_query_ptr),
                plan.item_segment_ptr[:-1],
                plan.item_segment_ptr[1:],
                strict=True,
            )
        )
    )


def plans_of(batch, target, capacity, device=CPU, policy=AUTO):
    """The plans of the reference and of the device planner, which decide the same."""
    host, _ = plan_forest(batch.forest(), policy, target, capacity)
    made = plan_of(batch, target, capacity, device, policy)
    assert items_of(made) == items_of(host)
    assert made.tile_ptr.tolist() == host.tile_ptr.tolist()
    assert made.num_partials == host.num_partials
    assert sorted(made.reduce_query.tolist()) == sorted(host.reduce_query.tolist())
    return host, made


# The interpreted planner prices four chunk lengths; with one block in a range there is only one.
ONE_BLOCK = replace(TARGET, block_tokens=32_768)


def test_leaves_merge_as_many_results_as_the_hosts_do():
    """Requests that leave one path one after another, with 2, 3, 4, … results each."""
    levels = np.arange(1, 12) * 400
    batch = batch_of(build_forest(np.arange(12), levels, np.append(levels, 11 * 400) + 30))
    host, device = plans_of(batch, ONE_BLOCK, PlanCapacity.for_batch(64))
    results = np.bincount(device.entry_query)
    assert {MAX_MERGED + 1, MAX_MERGED + 2} < set(results.tolist())  # including its own
    expected = np.flatnonzero(results > MAX_MERGED + 1).tolist()
    assert host.reduce_query.tolist() == expected


@pytest.mark.parametrize(("private", "shared"), [(0, 192), (8, 192), (80, 0)])
def test_a_requests_last_absolute_chunk_is_its_own(private, shared):
    """Of two requests with the same chunk of 192 tokens, and 8 behind; some may be private."""
    batch = batch_of(regular_forest([1, 2], [200, 0]))
    planner, plan = planner_for(TARGET, 2, 1, PlanCapacity(2, 9, 9, 9), policy=Invariant(512))
    tables, lens = (torch.from_numpy(a) for a in (batch.page_tables, batch.seq_lens))
    planner.plan(tables[:, :200].contiguous(), torch.arange(2), lens, private_tokens=private)
    ends = [end for queries, (_, end), *_ in items_of(read_plan(plan)) if queries == 2]
    assert (max(ends, default=0), len(read_plan(plan).entry_query)) == (shared, 4)


@pytest.mark.parametrize(("height", "ends"), [(4, [0, 1, 9, 11, 11]), (8, [0, 0, 9, 11, 11])])
def test_items_of_the_ordered_tile_follow_the_large_tiles(height, ends):
    """The chunk that two requests share is shorter than their own chunks."""
    batch = batch_of(regular_forest([1, 2], [512, 3000]))
    target = replace(TARGET, ordered_height=height, ordered_from=2)
    _, made = plans_of(batch, target, PlanCapacity(2, 32, 32, 32), policy=Invariant(512))
    assert made.tile_ptr.tolist() == ends
    check_plan(batch, made, target)


@settings(deadline=None, max_examples=25)
@given(short_tokens=st.sampled_from([512, 1536, 2048]), data=st.data())
def test_absolute_chunks_begin_where_the_references_do(short_tokens, data):
    """Three requests that end and part near the ends of chunks, in arrays that just hold them."""
    policy, longest = Invariant(short_tokens), 1 << 20

    def draw(least, most):
        chunk = int(policy.chunk_at(data.draw(st.integers(least, most)), longest * 2))
        near = int(policy.begin_of(chunk, longest * 2)) + data.draw(st.integers(-2, 2))
        near += data.draw(st.sampled_from([-1, 0, 1, 2])) * 128
        return min(max(near, least), most)

    octave = 1 << data.draw(st.integers(4, 20))
    lens = np.array([draw(1, octave) for _ in range(3)], np.int32)
    tables = np.arange(3 * (max(lens) // 8 + 1), dtype=np.int32).reshape(3, -1)
    for row in (1, 2):
        shared = draw(0, int(min(lens[row - 1 : row + 1]))) // 8
        tables[row, :shared] = tables[row - 1, :shared]
    most = max(policy.num_chunks(length) for length in lens.tolist())
    most = 3 * max(most, policy.most_chunks(tables.shape[1] * 8))
    capacity = PlanCapacity(3, most, most, most)
    host, device = plans_of(Batch(tables, lens, 8), TARGET, capacity, policy=policy)
    for request, length in enumerate(lens.tolist()):
        mine = np.repeat(np.arange(device.num_items), np.diff(device.item_query_ptr))
        begins = device.segment_start[mine[device.entry_query == request]]
        expected = policy.begin_of(np.arange(policy.num_chunks(length)), length)
        assert sorted(begins.tolist()) == expected.tolist()
    assert host.num_partials <= capacity.max_entries


@pytest.fixture
def all_candidates(monkeypatch):
    """All chunk lengths that a GPU prices, like the reference; the interpreter prices four."""
    interpreted = ProgramWork.interpreted

    def as_on_a_gpu(cls, size):
        return replace(interpreted(size), candidates=ProgramWork.on_gpu(size).candidates)

    monkeypatch.setattr(ProgramWork, "interpreted", classmethod(as_on_a_gpu))


def random_batch(seed, requests, depths, private=1500):
    """Neighbours share random depths; some requests end where they part from the next one."""
    random = np.random.default_rng(seed)
    shared = random.choice(depths, size=requests - 1)
    longest = np.maximum(np.append(shared, 0), np.append(0, shared))
    lens = longest + random.integers(0, private, size=requests) * random.integers(0, 5, requests)
    batch = batch_of(build_forest(np.arange(requests), shared, np.maximum(lens, 1)), seed)
    # Both planners then keep the order of the rows: FastTree's search depends on it.
    rows = zip(batch.page_tables.tolist(), batch.seq_lens.tolist(), strict=True)
    tables, lengths = zip(*sorted(rows, key=lambda row: row[0][: row[1]]), strict=True)
    return Batch(np.array(tables, np.int32), np.array(lengths, np.int32), 1)


@pytest.mark.parametrize("heads", [(32, 32), (32, 8), (16, 1)], ids=str)
@pytest.mark.parametrize("policy", [AUTO, FastTree(FastTreeCoefficients(0.66, 0.33, 0.1))], ids=str)
@pytest.mark.parametrize("seed", [1, 3])
def test_edges_are_cut_as_the_reference_cuts_them(seed, policy, heads):
    """One KV block holds every range, so only the edges decide.

    Long nodes make close decisions of `auto`, short ones those of FastTree.
    """
    long, short = ([0, 16, 48, 96, 160, 400, 900, 3000], 300), ([0, 3, 8, 16, 33, 96, 400], 40)
    batch = random_batch(seed, 10 * seed + 8, *(long if policy is AUTO else short))
    target = Target(*heads, head_dim=128, block_tokens=32_768)
    plans_of(batch, target, PlanCapacity.for_batch(64, 2000), policy=policy)


ON_DEVICE = [*POLICIES]


def makespan_of(plan, batch, target):
    """Least time of the plan's items on each tile shape's programs, by the tile's ``C_est``."""
    end = np.where(plan.segment_end < 0, batch.seq_lens[plan.segment_request], plan.segment_end)
    tokens = end - plan.segment_start
    large = np.arange(len(tokens)) < plan.tile_ptr[1]
    total = 0.0
    for shape, mine in enumerate((~large, large)):
        slices = target.costs.time(target.tile_heights[shape], tokens[mine])
        if len(slices):
            total += longest_first(slices, target.tile_programs[shape])
    return total


@pytest.mark.usefixtures("all_candidates")
@pytest.mark.parametrize("name", ON_DEVICE)
@pytest.mark.parametrize("seed", [0, 2, 4])  # each with heads of its own
def test_the_host_planner_decides_the_same_by_every_policy(name, seed):
    """Plans are equal item by item. FlashForge's costs are float32 on the device: makespans are."""
    batch = random_batch(seed, 3 + 5 * seed, [0, 16, 96, 100, 400, 3000, 9000])
    target = Target(*[(32, 8), (32, 32), (16, 1)][seed % 3], head_dim=128)
    capacity = PlanCapacity.for_batch(64, 2000)
    policy = POLICIES[name]
    if name != "flashforge":
        _, device = plans_of(batch, target, capacity, policy=policy)
    else:
        host, _ = plan_forest(batch.forest(), policy, target, capacity)
        device = plan_of(batch, target, capacity, policy=policy)
        expected = makespan_of(host, batch, target)
        assert makespan_of(device, batch, target) == pytest.approx(expected, rel=0.01)
    check_plan(batch, device, target)


@settings(deadline=None, max_examples=50)
@given(
    batch=batches(max_requests=12).filter(lambda b: len(b.seq_lens) > 0),
    target=targets,
    name=st.sampled_from(ON_DEVICE),
    weights=st.tuples(*[st.sampled_from([0.0, 0.1, 5.0])] * 3),
)
def test_every_policys_plan_attends_to_every_token_once(batch, target, name, weights):
    policy = POLICIES[name]
    if name == "fasttree":
        policy = FastTree(FastTreeCoefficients(*weights))
    check_plan(batch, plan_of(batch, target, policy=policy), target)


@pytest.mark.usefixtures("all_candidates")
@pytest.mark.parametrize("name", ["deft-node", "deft-node-chunk", "deft-flatten", "fasttree"])
def test_a_policy_that_does_not_fit_reads_whole_contexts(name):
    """Both planners then cut contexts by the policy's rule of chunks."""
    levels = np.arange(1, 24) * 100
    batch = batch_of(build_forest(np.arange(24), levels, np.append(levels, 23 * 100) + 30))
    policy = POLICIES[name] if name != "fasttree" else FastTree(FastTreeCoefficients(0, 0, 0))
    capacity = PlanCapacity(24, 200, 60, 200)
    _, plan = plans_of(batch, TARGET, capacity, policy=policy)
    check_plan(batch, plan, TARGET)
    assert set(np.diff(plan.item_query_ptr).tolist()) == {1}
    assert len(plan.entry_query) <= capacity.max_entries


@pytest.mark.usefixtures("all_candidates")
@pytest.mark.parametrize("programs", [1, 3, 9])
@pytest.mark.parametrize("seed", range(3))
def test_flattened_chunks_are_as_long_as_the_hosts(seed, programs):
    """Chunks double for the programs' sake, and a short rest joins the last one."""
    batch = random_batch(seed, 12, [0, 3, 130, 400], private=200)
    target = replace(TARGET, tile_programs=(16, 4, programs))
    plans_of(batch, target, PlanCapacity.for_batch(64, 2000), policy=DeftFlatten())


def test_flattened_chunks_double_up_to_the_longest_item():
    """Twice these tokens and a short rest would be more than an item may have."""
    table, lens = np.arange(24, dtype=np.int32).reshape(3, 8), np.full(3, 31 << 20, np.int32)
    batch = Batch(table, lens, 1 << 22)
    target = replace(TARGET, tile_programs=(16, 4, 1))
    for chunk_tokens in (MAX_ITEM_TOKENS // 3, MAX_ITEM_TOKENS // 2):
        plans_of(batch, target, PlanCapacity.for_batch(64), policy=DeftFlatten(chunk_tokens))


@pytest.mark.parametrize("policy", [AUTO, DeftFlatten(chunk_tokens=40)], ids=str)
@pytest.mark.parametrize("requests", [12, 45])
def test_how_programs_divide_the_work_decides_nothing(requests, policy, monkeypatch):
    """Many small programs and loops, as on a GPU; the interpreter runs few programs."""
    depths, own = ([0, 400, 900, 900, 3000, 5000], 1500) if policy is AUTO else ([0, 40, 90], 30)
    batch = random_batch(0, requests, depths, own)
    expected = plan_of(batch, policy=policy)
    assert len(set(expected.segment_span.tolist())) > 1  # some nodes have items
    few = {"rows": 8, "sorted": 8, "nodes": 4, "ranges": 4, "leaf_columns": 16, "node_columns": 4}
    few |= {"leaves": 16, "node_programs": 2, "tile_programs": 3, "width": 8}
    small = replace(ProgramWork.interpreted(64), **few)
    monkeypatch.setattr(ProgramWork, "interpreted", lambda size: small)
    found = plan_of(batch, policy=policy)
    for name, array in vars(expected).items():
        np.testing.assert_array_equal(getattr(found, name), array, err_msg=name)


def test_what_an_interrupted_plan_left_behind_gives_no_wrong_plan():
    """Ranks that are not zero: the next plan is right, and the one after it as always."""
    batch = batch_of(regular_forest([1, 4, 3], [900, 300, 50]))
    planner, plan = planner_for(TARGET, 12, 1)
    for ranks in planner._scratch.ranks:
        ranks.copy_(torch.randint(0, 900, ranks.shape))
    tables, lens = torch.from_numpy(batch.page_tables), torch.from_numpy(batch.seq_lens)
    for _ in range(2):
        planner.plan(tables, torch.arange(12, dtype=torch.int32), lens)
        check_plan(batch, read_plan(plan), TARGET)
    assert items_of(read_plan(plan)) == items_of(plan_of(batch))


@pytest.mark.parametrize("length", [1 << 29, (1 << 30) + (1 << 28), (1 << 31) - (1 << 20)])
def test_the_longest_contexts_are_ordered_and_cut(length):
    """One context of many tokens next to a shared prefix; only its first columns are looked at."""
    table = np.arange(8 * 40, dtype=np.int32).reshape(8, 40)
    table[:6, :30] = table[0, :30]
    lens = np.full(8, 31 * 1024, dtype=np.int32)
    lens[7] = length
    made = plan_of(Batch(table, lens, 1024))
    held, large = np.diff(made.item_query_ptr), int(made.tile_ptr[1])
    assert (held[:large] == 6).all()
    assert (held[large:] == 1).all()
    own = np.flatnonzero(made.segment_request == 7)
    own = own[np.argsort(made.segment_start[own])]
    assert len(own) > 1
    assert made.segment_start[own[0]] == 0
    assert made.segment_end[own[-1]] < 0  # open
    assert made.segment_start[own[1:]].tolist() == made.segment_end[own[:-1]].tolist()


def many(requests):
    """Short contexts, one long shared document, and a few long unshared contexts."""
    random = np.random.default_rng(0)
    shared = random.choice([0, 16, 96, 96, 400, 400], size=requests - 1)
    some = min(40, requests // 3)
    shared[:some] = 20000
    longest = np.maximum(np.append(shared, 0), np.append(0, shared)) + 5
    longest[-2:] += 4000
    return batch_of(build_forest(np.arange(requests), shared, longest))


on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="the same kernels, compiled")


@pytest.mark.usefixtures("all_candidates")
@pytest.mark.parametrize(
    ("device", "requests"),
    [
        ("cpu", largest_batch() - 100),
        *(pytest.param("cuda", n, marks=on_cuda) for n in (12, 64, 200, 900, 1025, 2048)),
    ],
)
def test_the_host_planner_decides_the_same_for_any_batch(device, requests):
    """Every batch size that the kernels are compiled for; interpreted, the largest batch with some
    padding requests.
    """
    batch, capacity = many(requests), PlanCapacity.for_batch(largest_batch())
    target = Target(num_query_heads=32, num_kv_heads=8, head_dim=128)
    host, found = plans_of(batch, target, capacity, torch.device(device))
    uncut, _ = plan_forest(batch.forest(), AUTO, replace(target, block_tokens=1 << 15), capacity)
    assert host.num_items > uncut.num_items
    check_plan(batch, found, target)


def test_what_a_row_held_before_it_ended_is_not_shared():
    """Prefixes in two places, and a row that ends early with old pages behind its end.

    In the planner's order, the second row is next to the first and shares five pages with others.
    The first row once held the fifth page at the same position.
    """
    held = np.array(
        [[1, 5, 8, 13, 17, 20], [1, 5, 8, 12, 17, 21], [0, 4, 8, 13, 17, 21], [1, 4, 8, 12, 17, 20]]
    )
    tables = np.concatenate((held, [[30], [31], [32], [33]]), axis=1).astype(np.int32)
    lens = np.array([3, 6, 6, 6], dtype=np.int32) * 512 + 1
    plan = plan_of(Batch(tables, lens, 512))
    tables[:, :6] &= ~1  # both copies hold the same tokens
    check_plan(Batch(tables, lens, 512), plan, TARGET)


def test_no_page_is_looked_for_beyond_the_table():
    """Rows of a wider table with equal entries behind the end, and lengths beyond this table."""
    wide = np.tile(np.arange(20, dtype=np.int32), (3, 1))
    planner, plan = planner_for(TARGET, 3, 512)
    rows, lens = torch.arange(3), torch.full((3,), 18 * 512, dtype=torch.int32)
    planner.plan(torch.from_numpy(wide)[:, :6], rows.int(), lens)
    made = read_plan(plan)
    shared = np.diff(made.item_query_ptr) > 1
    assert made.segment_end[shared].max() == 6 * 512


@settings(deadline=None, max_examples=10)
@given(data=st.data())
def test_what_was_planned_before_decides_nothing(data):
    """One planner for several batches: each gets the plan that a new planner would make."""
    first = data.draw(batches().filter(lambda batch: len(batch.seq_lens) > 0))
    others = batches(page_size=first.page_size).filter(lambda batch: len(batch.seq_lens) > 0)
    before = data.draw(st.lists(others, min_size=1, max_size=2))
    planner, plan = planner_for(TARGET, 64, first.page_size)
    grown = replace(first, seq_lens=first.seq_lens + GROWTH)
    fresh = {}
    for batch in (*before, first, grown, first):
        tables = torch.from_numpy(np.ascontiguousarray(batch.page_tables))
        rows = torch.arange(len(batch.seq_lens), dtype=torch.int32)
        planner.plan(tables, rows, torch.from_numpy(batch.seq_lens))
        if id(batch) not in fresh:
            fresh[id(batch)] = plan_of(batch, capacity=PlanCapacity.for_batch(64))
        made = read_plan(plan)
        for name, expected in vars(fresh[id(batch)]).items():
            np.testing.assert_array_equal(getattr(made, name), expected, err_msg=name)


def test_a_plan_that_was_refused_leaves_the_one_before():
    batch = batch_of(regular_forest([1, 3], [50, 10]))
    tables, lens = torch.from_numpy(batch.page_tables), torch.from_numpy(batch.seq_lens)
    k, v = torch.randn(2, int(tables.max()) + 1, 2, 64)
    q = torch.randn(3, 4, 64)
    tree = tree_attention(max_batch=largest_batch() + 1)
    with pytest.raises(PolicyError, match=f"at most {largest_batch()} requests"):
        tree.plan_batch(tables, lens, on_device=True)
    with pytest.raises(AttentionError, match="nothing is planned"):
        tree.run(q, k, v, tables, lens)
    tree.plan(batch.forest())
    expected = tree.run(q, k, v, tables, lens)
    with pytest.raises(PolicyError):
        tree.plan_batch(tables, lens, on_device=True)
    assert torch.equal(tree.run(q, k, v, tables, lens), expected)


@pytest.mark.parametrize("capacity", [(6, 4, 6, 9), (6, 9, 5, 9), (6, 9, 9, 8)])
def test_a_plan_without_room_for_its_batch_is_refused(capacity):
    plan = DevicePlan(PlanCapacity(*capacity), torch.device("cpu"))
    with pytest.raises(PolicyError, match="an item, an entry and a KV range for each request"):
        DevicePlanner(Target(4, 2, 64), Auto(), plan, torch.device("cpu"), 1, overlapped=False)


def test_what_cannot_be_planned_on_the_device_is_named():
    table, lens = torch.zeros((2, 8), dtype=torch.int32), torch.tensor([3, 4])
    attention = tree_attention(max_batch=8)
    with pytest.raises(AttentionError, match="raise max_batch"):
        tree_attention(max_batch=1).plan_batch(table, lens, on_device=True)
    with pytest.raises(AttentionError, match=r"seq_lens has dtype torch\.float32"):
        attention.plan_batch(table, lens.float(), on_device=True)
    with pytest.raises(AttentionError, match="table_rows has shape"):
        attention.plan_batch(table, lens, table_rows=torch.zeros(3).int(), on_device=True)
    with pytest.raises(AttentionError, match="contiguous rows"):
        attention.plan_batch(table.t(), lens, on_device=True)


def test_a_compiled_variant_belongs_to_one_policy_and_a_plan_takes_few_launches(monkeypatch):
    """What a launch keeps for a variant, another planner in this process finds: its own alone."""
    kept, launches = {}, Counter()

    def launch(kernel, grid, arguments, constants, *, variant, **options):
        kind = constants, len(tree_leaves(arguments))
        known = kept.setdefault((id(kernel), variant), kind)
        assert known == kind, f"one variant of {kernel._name} for two kinds of launches"
        launches[name] += 1

    monkeypatch.setattr(Kernel, "launch", launch)
    table = torch.zeros((4, 8), dtype=torch.int32)
    lens = torch.full((4,), 5, dtype=torch.int32)
    for name in ON_DEVICE:
        for heads in (4, 8):
            attention = tree_attention(num_query_heads=heads, max_batch=4, policy=name)
            attention.plan_batch(table, lens, on_device=True)
        costs = attention.target.costs
        shorter = replace(costs, tokens=costs.tokens[::2], time_ms=costs.time_ms[::2])
        target = replace(attention.target, cost_model=shorter)
        rows = torch.arange(4, dtype=torch.int32)
        attention.device_planner.plan(table, rows, lens, target=target)
    others = {"invariant": 6, "deft-flatten": 9}
    assert launches == {name: 3 * others.get(name, 7) for name in ON_DEVICE}


@pytest.mark.parametrize("name", ON_DEVICE)
def test_a_plan_of_the_same_tensors_repeats_its_launches(name, monkeypatch):
    """From the third plan on, with addresses for tensors: exactly what a full plan launches."""
    unknown = set()
    launched, repeated = noted_launches(monkeypatch, planner_module, unknown)
    tables, rows = torch.zeros((8, 64), dtype=torch.int32), torch.arange(8, dtype=torch.int32)
    lens = torch.full((2, 8), 5, dtype=torch.int32)
    planner, _ = planner_for(TARGET, 8, 1, policy=POLICIES[name])

    def plan(lens, rows=rows, tables=tables, **changes):
        launched.clear(), repeated.clear()
        planner.plan(tables, rows[: len(lens)], lens, **changes)
        return [*launched], [*repeated]

    for number, each in enumerate(lens):  # hosts may take turns with their tensors
        (first, none), (second, still), (trial, of_trial) = plan(each), plan(each), plan(each)
        assert first == second
        assert not none + still
        # The first repeat of all is a trial, which a full plan follows.
        assert (trial, of_trial) == ([] if number else first, first)
        assert plan(each) == ([], first)
        assert plan(each[:4])[0] != first
    assert plan(lens[0])[1]
    assert plan(lens[0], target=replace(TARGET, num_sms=7))[0]
    assert plan(lens[0], private_tokens=3)[0]
    shifted = torch.zeros(513, dtype=torch.int32)[1:].view(8, 64)
    aligned, unaligned = lens[1][:4], lens.flatten()[1:5]
    for each in ((unaligned,), (aligned, rows[1:]), (aligned, rows, shifted)):
        assert all(plan(*each)[0] for _ in range(3))
    unknown.add(first[-1][0])  # whatever Triton has not compiled makes the whole plan anew
    assert all(len(plan(lens[0][:5])[0]) == len(first) for _ in range(3))


@pytest.mark.parametrize("name", ["auto", "fasttree", "deft-flatten"])
def test_a_repeat_that_loses_any_of_its_launches_ends_repeats(name, monkeypatch, caplog):
    """The trial finds it, although the plan before left the same numbers in memory.

    The full plan behind the trial is the one that counts.
    """
    full_launch, tensors, launched, lost = Kernel.launch, {}, [], None

    def launch(kernel, programs, arguments, constants, **options):
        given = (each for each in tree_leaves(arguments) if isinstance(each, torch.Tensor))
        tensors.update({each.data_ptr(): each for each in given})
        launched.append(kernel._name)
        full_launch(kernel, programs, arguments, constants, **options)

    def runner(kernel, programs, *, variant):
        def run(*arguments, stream):
            if kernel._name != lost:
                at = len(arguments) - len(kernel.constants)
                constants = dict(zip(kernel.constants, arguments[at:], strict=True))
                given = tree_map(lambda each: tensors.get(each, each), arguments[:at])
                options = {"variant": variant, "aligned": True, "interpreted": True}
                full_launch(kernel, programs, given, constants, **options)

        return run

    active = SimpleNamespace(get_current_stream=lambda device: 7, get_current_device=lambda: 0)
    monkeypatch.setattr(Kernel, "launch", launch)
    monkeypatch.setattr(Kernel, "runner", runner)
    monkeypatch.setattr(planner_module, "driver", SimpleNamespace(active=active))
    tables = torch.arange(8 * 1024, dtype=torch.int32).view(8, 1024)
    tables[1::2, :600] = tables[1, :600].clone()
    rows, lens = torch.arange(8, dtype=torch.int32), torch.full((8,), 1000, dtype=torch.int32)
    while True:
        launched.clear(), caplog.clear()
        planner, plan = planner_for(
            TARGET, 8, 1, PlanCapacity(8, 256, 512, 512), policy=POLICIES[name]
        )
        fresh = tree_map(torch.clone, planner._scratch.cleared)
        planner.plan(tables, rows, lens)
        first, names = read_plan(plan).arrays(), [*launched]
        for _ in range(3):
            planner.plan(tables, rows, lens)
            np.testing.assert_equal(read_plan(plan).arrays(), first)
        assert planner.counters[0] == 4
        assert len(launched) == len(names) * (3 if lost is None else 4)
        assert len(caplog.messages) == bool(lost)
        assert bool(lost) == ("differ from a full plan" in caplog.text)
        planner._scratch.clear()
        assert all(map(torch.equal, planner._scratch.cleared, fresh))
        left = names if lost is None else names[names.index(lost) + 1 :]
        if not left:
            break
        lost = left[0]
