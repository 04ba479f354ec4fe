"""Policy `invariant`: fixed chunks, plans that always fit, and bits that depend on nothing else."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_checks import tree_attention
from cost_keys import KEY
from deft_backend.attention.reference_attention import reference_attention, relative_error
from deft_backend.compile.triton_kernel import interpreted_copy
from deft_backend.costs.tables import GpuFacts, shipped_for
from deft_backend.forest import forest_from_page_tables
from deft_backend.kernels import configurations
from deft_backend.planner.on_device import tiles
from deft_backend.policies import Invariant, PolicyError, Target, invariant
from strategies import batches

C = 16  # tokens of a first chunk, so that contexts of the tests have many chunks


def test_where_chunks_begin():
    for short, length, begins in (
        (512, 512, [0, 256, 448]),
        (512, 513, [0, 256, 384, 512]),
        (2048, 3000, [0, 512, 1024, 1536, 2048, 2560, 2944]),
        (2048, 4200, [0, 512, 1024, 1536, 2048, 3072, 3584, 3840, 4096]),
        (512, 40_000, [0, *range(512, 33_280, 1024), 33_280, 35_328, 37_376, 39_424, 39_936]),
    ):
        chunks = np.arange(Invariant(short).num_chunks(length))
        assert Invariant(short).begin_of(chunks, length).tolist() == begins


@pytest.mark.parametrize("policy", [Invariant(512), Invariant(1536), Invariant(2048)], ids=str)
def test_chunks_of_every_length(policy):
    """They hold each token once, few of them are the request's own, and the bound holds."""
    most = 0
    for length in [*range(1, 6000), *range(6011, 200_000, 977), 1 << 20, (1 << 20) + 64]:
        chunks = policy.num_chunks(length)
        begins = policy.begin_of(np.arange(chunks + 1), length)
        for at in (begins[:-1], np.append(begins[1:-1], length) - 1):
            assert policy.chunk_at(at, length).tolist() == list(range(chunks))
        assert 0 < length - begins[-2] <= max(256, length / 64)
        assert begins[-1] >= length
        most = max(most, chunks)
        assert most <= policy.most_chunks(length) <= chunks + 3


@pytest.mark.parametrize("policy", [Invariant(512), Invariant(2048)], ids=str)
def test_requests_share_all_chunks_that_both_have(policy):
    lengths = np.array([*range(1, 2900, 61), 512, 513, 4097, 6143, 40_000])
    begins = [policy.begin_of(np.arange(policy.num_chunks(n)), n).tolist() for n in lengths]
    for length, mine in zip(lengths, begins, strict=True):
        same = [max(a for a, b in zip(mine, other, strict=False) if a == b) for other in begins]
        assert policy.alike(np.full_like(lengths, length), lengths).tolist() == same


H200 = ("NVIDIA H200", GpuFacts(132, 1980.0, 4814.304))


@pytest.mark.parametrize(
    ("heads", "head_dim", "dtype", "gpu", "expected"),
    [
        ((32, 8), 128, "bfloat16", H200, 512),
        ((32, 8), 128, "float8_e4m3fn", H200, 512),  # less time for a token, as much for an item
        ((32, 32), 128, "float16", H200, 2048),  # a token that one query reads alone costs more
    ],
)
def test_the_costs_of_a_head_shape_choose_the_chunks(heads, head_dim, dtype, gpu, expected):
    sizes = {"query_heads": heads[0], "kv_heads": heads[1], "head_dim": head_dim, "dtype": dtype}
    costs = shipped_for(replace(KEY, gpu=gpu[0], **sizes), gpu[1])
    target = Target(*heads, head_dim, tile_programs=(264 // heads[1],) * 3, cost_model=costs)
    assert Invariant.for_target(target).short_tokens == expected


def test_the_largest_batch_changes_the_room_alone():
    """The same chunks for any limits; what does not fit is refused, with what would."""
    small, large = (
        tree_attention(policy="invariant", max_batch=batch, max_tokens=tokens)
        for batch, tokens in ((2, 300), (64, 131_072))
    )
    assert small.policy == large.policy == Invariant(small.short_tokens)
    assert small.capacity.max_entries == 2 * small.policy.most_chunks(300)
    chunks = Invariant(512).most_chunks(131_072)
    most = (2 << 30) // (chunks * 8448)
    Invariant(512).check_workspace(most, 131_072, 8448)
    with pytest.raises(PolicyError, match=f"exceed 2048 MiB; allow at most {most} at a time"):
        Invariant(512).check_workspace(most + 1, 131_072, 8448)


class Pool:
    """Requests that share prefixes, each with queries of its own, as rows of one page table.

    `moved` holds the same tokens in other pages, under other page ids.
    """

    def __init__(
        self, batch, *, dtype=torch.float16, kv_dtype=None, query_tokens=1, num_query_heads=4
    ):
        generator = torch.Generator().manual_seed(int(batch.seq_lens.sum()))
        self.page_size = batch.page_size
        self.tables = torch.from_numpy(np.ascontiguousarray(batch.page_tables))
        lens = torch.from_numpy(batch.seq_lens)
        self.lens = lens * (lens >= query_tokens)
        pages = int(self.tables.max()) + 1 if self.tables.numel() else 1
        shape = (2, pages, batch.page_size, 2, 64)
        self.k, self.v = torch.randn(shape, generator=generator).to(kv_dtype or dtype)
        queries = (len(self.lens), query_tokens, num_query_heads, 64)
        self.q = torch.randn(queries, generator=generator).to(dtype)
        names = torch.randperm(pages, generator=generator)
        back = torch.argsort(names)
        self.moved = (self.k[back], self.v[back], names.to(self.tables.dtype))

    def run(self, attention, requests, lens, q, *, moved=False, spare=0, on_device=True, **given):
        """The outputs of a batch of these requests, at these lengths, like `q`."""
        k, v, tables = self.k, self.v, self.tables[requests]
        if moved:
            k, v, names = self.moved
            tables = names[tables.long()]
        tables = torch.nn.functional.pad(tables, (0, spare)).contiguous()
        attention.poison_workspace()
        if on_device:
            attention.plan_batch(tables, lens, query_tokens=q.shape[1], on_device=True)
        else:
            forest = forest_from_page_tables(tables, lens, self.page_size)
            attention.plan(forest, query_tokens=q.shape[1])
        out = torch.full_like(q.flatten(0, 1), float("nan"))
        return attention.run(q.flatten(0, 1), k, v, tables, lens, out=out, **given).view_as(q)


@pytest.fixture(scope="module")
def attention_of():
    """Attentions whose first chunks have C tokens; hypothesis draws many batches for each."""
    patched = pytest.MonkeyPatch()
    patched.setattr(invariant, "CHUNK", C)
    patched.setattr(interpreted_copy(tiles), "CHUNK", tl.constexpr(C))
    patched.setattr(Invariant, "for_target", lambda target: Invariant(2 * C))
    patched.setattr(configurations, "ORDERED_FROM", 3)  # batches here are small
    made = {}

    def attention_of(max_batch=12, **changes):
        key = (max_batch, *sorted(changes.items()))
        if key not in made:
            changes = {"dtype": torch.float16, **changes}
            made[key] = tree_attention(
                policy="invariant", max_batch=max_batch, max_tokens=2048, **changes
            )
            assert made[key].short_tokens == 2 * C
        return made[key]

    yield attention_of
    patched.undo()


KINDS = {
    "float16": ({}, {}),
    "bfloat16": ({"dtype": torch.bfloat16}, {}),
    "float32": ({"dtype": torch.float32}, {}),
    "8 bits": ({"kv_dtype": torch.float8_e4m3fn}, {"k_scale": 0.5, "v_scale": 2.0}),
    "soft cap": ({}, {"logit_cap": 3.0}),
    "sinks": ({}, {"sinks": torch.tensor([0.5, -1.0, 3.0, 0.0])}),
    "groups of 3": ({"num_query_heads": 6}, {}),
    "chains of 3": ({"query_tokens": 3}, {}),
    "long chains": ({"query_tokens": 9, "num_query_heads": 6}, {}),
}


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None, max_examples=8)
@given(batch=batches(max_requests=8).filter(lambda batch: len(batch.seq_lens) > 0), data=st.data())
def test_a_requests_bits_depend_on_the_request_alone(attention_of, kind, batch, data):
    changes, given = KINDS[kind]
    attention = attention_of(page_size=batch.page_size, **changes)
    pool = Pool(batch, **changes)
    count = len(pool.lens)
    target = data.draw(st.integers(0, count - 1))
    alone = [target]
    expected = pool.run(attention, alone, pool.lens[alone], pool.q[alone], **given)
    reference = reference_attention(
        pool.q[target], pool.k, pool.v, pool.tables[alone], pool.lens[alone], **given
    )
    if pool.lens[target] > 0:
        tolerance = 2e-6 if attention.dtype == torch.float32 else 6e-3
        assert relative_error(expected[0], reference) <= tolerance
    for _ in range(2):
        others = data.draw(st.lists(st.integers(0, count - 1), max_size=7))
        place = data.draw(st.integers(0, len(others)))
        requests = [*others[:place], target, *others[place:]]
        lens = pool.lens[requests]
        for at in range(len(requests)):  # neighbours that grow, or have ended
            if at != place:
                lens[at] = data.draw(st.integers(0, int(lens[at])))
        lens *= lens >= pool.q.shape[1]
        q = torch.randn(len(requests), *pool.q.shape[1:]).to(attention.dtype)
        q[place] = pool.q[target]
        found = pool.run(
            attention_of(
                data.draw(st.sampled_from([12, 40])), page_size=batch.page_size, **changes
            ),
            requests,
            lens,
            q,
            moved=data.draw(st.booleans()),
            spare=data.draw(st.sampled_from([0, 5])),
            on_device=data.draw(st.booleans()),
            static_launch=data.draw(st.booleans()),
            **given,
        )
        assert torch.equal(found[place], expected[0])
