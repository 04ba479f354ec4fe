"""Policy `invariant`: fixed chunks, plans that always fit, and bits that depend on nothing else."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_checks import tree_attention
from deft_backend.attention.reference_attention import reference_attention, relative_error
from deft_backend.forest import forest_from_page_tables
from deft_backend.policies import Invariant, PolicyError, invariant
from deft_backend.policies.invariant import WORKSPACE_LIMIT, Places
from strategies import batches

C = 4  # tokens of a first chunk, so that contexts of the tests have many chunks


@pytest.mark.parametrize("places", [Places(1, 16), Places(3, 4), Places(256, 16), Places(256, 8)])
def test_chunks_follow_one_another_and_double_in_each_octave(places):
    token = np.arange(200_000)
    chunk = places.chunk_at(token)
    assert set(np.diff(chunk).tolist()) == {0, 1}
    assert (places.begin_of(chunk) <= token).all()
    assert (token < places.begin_of(chunk + 1)).all()
    length = np.diff(places.begin_of(np.arange(chunk[-1] + 1))) // places.chunk_tokens
    octave = np.arange(len(length)) // places.per_octave
    assert (length == 2 ** np.maximum(octave - 1, 0)).all()


def test_chunks_are_as_short_as_the_largest_batchs_partial_results_allow():
    expected = {(256, 8192): (256, 16), (2048, 8192): (256, 8), (512, 131_072): (256, 16),
                (1024, 131_072): (256, 8), (2048, 131_072): (512, 4)}  # fmt: skip
    for (queries, tokens), places in expected.items():
        found = Invariant.for_limits(queries, tokens, 8448)
        assert found.places == places
        assert queries * found.num_chunks(tokens) * 8448 <= WORKSPACE_LIMIT
    with pytest.raises(PolicyError, match="partial result of each query: 600 of 1048576 bytes"):
        Invariant.for_limits(600, 4096, 1 << 20)


class Pool:
    """Requests that share prefixes, each with queries of its own, as rows of one page table.

    `moved` holds the same tokens in other pages, under other page ids.
    """

    def __init__(self, batch, *, dtype=torch.float16, kv_dtype=None, query_tokens=1):
        generator = torch.Generator().manual_seed(int(batch.seq_lens.sum()))
        self.page_size = batch.page_size
        self.tables = torch.from_numpy(np.ascontiguousarray(batch.page_tables))
        self.lens = torch.from_numpy(batch.seq_lens)
        pages = int(self.tables.max()) + 1 if self.tables.numel() else 1
        shape = (2, pages, batch.page_size, 2, 64)
        self.k, self.v = torch.randn(shape, generator=generator).to(kv_dtype or dtype)
        self.q = torch.randn(len(self.lens), query_tokens, 4, 64, generator=generator).to(dtype)
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
            attention.plan_on_device(tables, lens, query_tokens=q.shape[1])
        else:
            forest = forest_from_page_tables(tables, lens, self.page_size)
            attention.plan(forest, query_tokens=q.shape[1])
        out = torch.full_like(q.flatten(0, 1), float("nan"))
        return attention.run(q.flatten(0, 1), k, v, tables, lens, out=out, **given).view_as(q)


@pytest.fixture(scope="module")
def attention_of():
    """Attentions whose first chunks have C tokens; hypothesis draws many batches for each."""
    patched = pytest.MonkeyPatch()
    patched.setattr(invariant, "SHORTEST_CHUNK", C)
    made = {}

    def attention_of(max_batch=12, **changes):
        key = (max_batch, *sorted(changes.items()))
        if key not in made:
            changes = {"dtype": torch.float16, **changes}
            made[key] = tree_attention(
                policy="invariant", max_batch=max_batch, max_tokens=2048, **changes
            )
            assert made[key].policy.places.chunk_tokens == C
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
        lens = torch.stack(
            [pool.lens[r] for r in others[:place]]
            + [pool.lens[target]]
            + [pool.lens[r] for r in others[place:]]
        )
        for at in range(len(requests)):  # neighbours that grow, or have ended
            if at != place:
                lens[at] = data.draw(st.integers(0, int(lens[at])))
        q = torch.randn(len(requests), 1, 4, 64).to(attention.dtype)
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
