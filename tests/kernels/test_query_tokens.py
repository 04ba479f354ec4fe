"""Requests of several query tokens, chains and trees, against float64 attention."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_kernels import chunks_and_leaves, star

from attention_checks import DEVICES, Batch, check, tree_attention
from deft_backend import AttentionError, forest_from_page_tables
from deft_backend.attention.reference_attention import seen_tokens
from deft_backend.shapes import QueryBlocks
from random_batches import random_batch


def drafts(seed, requests, page_size, query_tokens, longest=60, spare=0):
    """A random forest; each request has `query_tokens` more tokens, on pages of its own."""
    made = random_batch(seed, page_size, requests, longest=longest)
    own = -(-(query_tokens + spare) // page_size) + 1
    table = np.zeros((requests, made.page_table.shape[1] + own), dtype=np.int32)
    used = made.num_pages
    for row, length in enumerate(made.seq_lens.tolist()):
        full = length // page_size
        table[row, :full] = made.page_table[row, :full]
        more = table.shape[1] - full
        table[row, full:] = np.arange(used, used + more)
        used += more
    return Batch(torch.from_numpy(table), made.seq_lens + query_tokens, used)


def tree_bits(seed, requests, query_tokens):
    """[B, Q, words] int64: a random tree for each request, as rows of a larger tensor.

    Token 0 is the root; each later token has an earlier one as its parent, and sees itself and all
    of its ancestors.
    """
    random = np.random.default_rng(seed)
    words = -(-query_tokens // 64)
    seen = np.zeros((requests, query_tokens, words * 64), dtype=bool)
    for request in seen:
        for token in range(query_tokens):
            if token:
                request[token] = request[random.integers(0, token)]
            request[token, token] = True
    packed = np.packbits(seen, axis=-1, bitorder="little").view(np.int64)
    held = torch.full((requests, query_tokens, words + 2), -1)
    held[:, :, :words] = torch.from_numpy(packed)
    return held[:, :, :words]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("query_tokens", [65, 256])
def test_many_query_tokens(on_device, device, query_tokens):
    """Several blocks of each request and several words of bits, as in DeFT's token trees."""
    batch = drafts(query_tokens, 2, 16, query_tokens)
    tree = tree_bits(query_tokens, 2, query_tokens)
    attention = check(
        batch,
        query_tokens,
        on_device=on_device,
        device=device,
        heads=(1, 1),
        page_size=16,
        tree=None if on_device and query_tokens == 65 else tree,
    )
    assert attention.target.query_blocks == -(-query_tokens // 64)


@pytest.mark.parametrize(
    ("heads", "chunks", "merged"), [((6, 2), 1, 0), ((6, 2), 9, 5), ((4, 4), 8, 0), ((4, 4), 9, 5)]
)
def test_sinks_of_several_query_tokens(heads, chunks, merged):
    """Merged by leaves of small tiles, and by stage 2: a head's sink joins each of its tokens."""
    group = chunks_and_leaves(90, chunks, 5)
    batch = star(5, 90, [7, 20])
    attention = check(
        batch, 6, heads=heads, group=group, sinks=torch.float32, dtype=torch.float32, grow=0
    )
    assert len(attention.batch.plan.reduce_query) == merged


@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_a_request_that_is_all_query_tokens(on_device):
    """A draft without a prompt, and a padding request."""
    table = torch.arange(24, dtype=torch.int32).reshape(3, 8)
    batch = Batch(table, torch.tensor([5, 0, 8], dtype=torch.int32), 24)
    check(batch, 5, on_device=on_device, counts=[5, 0, 5])
    check(batch, 5, on_device=on_device)


def test_query_tokens_of_equal_pages_are_read_apart():
    """Page tables that claim to share query tokens: each request still sees its own."""
    table = torch.arange(12, dtype=torch.int32).repeat(4, 1)
    batch = Batch(table, torch.tensor([12, 12, 9, 10], dtype=torch.int32), 12)
    for on_device in (False, True):
        check(batch, 4, on_device=on_device, tree=tree_bits(5, 4, 4))


def test_rows_of_no_request_stay_as_they_are():
    batch = drafts(4, 3, 1, 4)
    attention = tree_attention(max_batch=3, query_tokens=4)
    attention.plan(forest_from_page_tables(batch.page_table, batch.seq_lens), query_tokens=4)
    q, caches = torch.randn(12, 4, 64), torch.randn(2, batch.num_pages, 2, 64)
    start = torch.tensor([0, 4, 6, 9], dtype=torch.int32)
    out = torch.full_like(q, 7.0)
    attention.run(q, *caches, batch.page_table, batch.seq_lens, query_start=start, out=out)
    assert (out[9:] == 7.0).all()
    assert (out[:9] != 7.0).any(-1).all()
    fresh = attention.run(q, *caches, batch.page_table, batch.seq_lens, query_start=start)
    assert (fresh[9:] == 0.0).all()


def test_a_chain_as_bits_is_the_chain():
    """The same result, bit for bit, whether the chain comes as bits or not."""
    batch = drafts(11, 4, 16, 7)
    attention = tree_attention(dtype=torch.float16, page_size=16, max_batch=4, query_tokens=7)
    attention.plan(forest_from_page_tables(batch.page_table, batch.seq_lens, 16), query_tokens=7)
    q = torch.randn(28, 4, 64).half()
    caches = torch.randn(2, batch.num_pages, 16, 2, 64).half()
    bits = torch.tensor([[(2 << token) - 1] for token in range(7)]).expand(4, 7, 1)
    chain = attention.run(q, *caches, batch.page_table, batch.seq_lens)
    tree = attention.run(q, *caches, batch.page_table, batch.seq_lens, ancestors=bits)
    assert torch.equal(chain, tree)


def test_seen_tokens():
    assert seen_tokens(2, 4).int().tolist() == [[1, 1, 1, 0], [1, 1, 1, 1]]
    bits = torch.tensor([[0b01], [0b10]])
    assert seen_tokens(2, 4, bits).int().tolist() == [[1, 1, 1, 0], [1, 1, 0, 1]]


@given(query_tokens=st.integers(1, 300), group=st.integers(1, 64))
def test_query_blocks_hold_all_tokens_and_fit_a_tile(query_tokens, group):
    blocks = QueryBlocks.of(query_tokens, group)
    assert blocks.tokens * group <= 64
    fewer = (QueryBlocks.of(tokens, group).tokens for tokens in range(1, query_tokens + 1))
    assert QueryBlocks.most_tokens(query_tokens, group) == max(fewer)
    assert (blocks.blocks - 1) * blocks.tokens < query_tokens <= blocks.blocks * blocks.tokens


def test_numbers_of_query_tokens_that_are_refused():
    attention = tree_attention(max_batch=2, query_tokens=3)
    table, lens = torch.arange(10).view(2, 5).int(), torch.tensor([4, 5])
    made_for = "query_tokens is 4; the attention was made for 1 to 3"
    with pytest.raises(AttentionError, match=made_for):
        attention.plan(forest_from_page_tables(table, lens), query_tokens=4)
    with pytest.raises(AttentionError, match="query_tokens is 0"):
        attention.plan_batch(table, lens, query_tokens=0, on_device=True)
    with pytest.raises(AttentionError, match="query_tokens is 0; expected 1 to"):
        tree_attention(query_tokens=0)
