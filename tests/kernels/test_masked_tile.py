"""The masked tile in Gluon without a GPU: DeFT-Flatten in the emulation, against float64."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_gluon_kernels import emulated, launched
from test_query_tokens import drafts, tree_bits

import gluon_emulator
from deft_backend import TreeAttention, forest_from_page_tables
from deft_backend.attention.reference_attention import reference_attention, relative_error
from deft_backend.kernels.configurations import (
    HOPPER_LARGE_TILE,
    HOPPER_MASKED_TILE,
    HOPPER_SMALL_TILE,
)
from deft_backend.kernels.hopper.large_tile import copies as large_tile_copies
from deft_backend.kernels.hopper.large_tile import kernel as hopper_large_tile
from deft_backend.kernels.hopper.masked_tile import kernel as hopper_masked_tile
from deft_backend.kernels.hopper.masked_tile import segments as masked_tile_segments
from deft_backend.kernels.hopper.small_tile import kernel as hopper_small_tile
from deft_backend.policies.deft_flatten import DeftFlatten

EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2)


@pytest.fixture(autouse=True, scope="module")
def emulation() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for kernel, module in (
            (HOPPER_LARGE_TILE, hopper_large_tile), (HOPPER_MASKED_TILE, hopper_masked_tile),
            (HOPPER_SMALL_TILE, hopper_small_tile),
        ):  # fmt: skip
            patch.setattr(kernel, "launch", emulated(kernel, module))
        yield


def use_gluon(attention: TreeAttention, lookahead: int, programs: int, query_tokens: int) -> None:
    """Let the kernels in Gluon run the large and the masked tile of an attention on the CPU."""
    shape = attention._shapes[query_tokens]
    small, *others = shape.config.tiles
    changes: dict[str, Any] = {"block_tokens": 64, "num_warps": 4, "programs": programs}
    large, masked = (replace(tile, lookahead=lookahead, **changes) for tile in others)
    config = replace(shape.config, tiles=(small, replace(large, spread=True), masked))
    attention._shapes[query_tokens] = shape._replace(config=config)


def check(
    seed: int, requests: int, query_tokens: int = 1, *, page_size: int = 1, lookahead: int = 2,
    heads: tuple[int, int] = (4, 1), head_dim: int = 64, chunk: int = 128, grow: int = 0,
    kv_dtype: torch.dtype = torch.float16, programs: int = 3, longest: int = 200,
    logit_cap: float = 0.0, is_tree: bool = False, ragged: bool = False, sinks: bool = False,
    own_rows: bool = True, wide_v: bool = False, in_graph: bool = False,
) -> None:  # fmt: skip
    batch = drafts(seed, requests, page_size, query_tokens, longest=longest, spare=grow)
    random = np.random.default_rng(seed)
    generator = torch.Generator().manual_seed(seed)
    counts, start = [query_tokens] * requests, None
    if ragged:
        counts = random.integers(0, query_tokens + 1, requests).tolist()
        start = torch.tensor([0, *np.cumsum(counts).tolist()], dtype=torch.int32)
    bits = tree_bits(seed, requests, query_tokens) if is_tree else None
    q = torch.randn(sum(counts), heads[0], head_dim, generator=generator).half()
    shape = (2, batch.num_pages, page_size, heads[1], head_dim)
    k_cache, v_cache = torch.randn(shape, generator=generator).to(kv_dtype)
    if wide_v:  # other strides than K's
        v_cache = torch.cat([v_cache, v_cache], dim=2)[:, :, : heads[1]]
    attention = TreeAttention(
        num_query_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, dtype=torch.float16,
        device="cpu", page_size=page_size, max_batch=requests, policy="deft-flatten",
        kv_dtype=kv_dtype, query_tokens=query_tokens,
    )  # fmt: skip
    attention._current.policy = DeftFlatten(chunk)
    use_gluon(attention, lookahead, programs, query_tokens)
    table, lens = batch.page_table, batch.seq_lens
    attention.plan(forest_from_page_tables(table, lens, page_size), query_tokens=query_tokens)
    attention.poison_workspace()
    given: dict[str, Any] = {"logit_cap": logit_cap, "query_start": start, "ancestors": bits}
    if sinks:
        given["sinks"] = torch.randn(heads[0], generator=generator)
    expected = reference_attention(
        q.double(), k_cache.double(), v_cache.double(), table, lens + grow, **given
    )
    rows, held = None, table
    if not own_rows:
        rows = torch.randperm(requests, generator=generator)
        held = torch.empty_like(table)
        held[rows] = table
    out = torch.full_like(q, float("nan"))
    launched.clear()
    attention.run(
        q,
        k_cache,
        v_cache,
        held,
        lens + grow,
        table_rows=rows,
        out=out,
        static_launch=in_graph,
        **given,
    )
    begin, end = attention.last_plan.items_of(2)
    assert launched["hopper_masked_tile_attention"] == (begin < end or in_graph)
    assert out.isfinite().all()
    assert relative_error(out, expected) <= 1e-3


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**31 - 1),
    requests=st.integers(1, 24),
    page_size=st.sampled_from([1, 3, 16]),
    lookahead=st.sampled_from([1, 2, 3]),
    heads=st.sampled_from([(4, 1), (4, 2), (2, 2), (6, 2), (16, 1)]),
    chunk=st.sampled_from([32, 128, 128, 700]),
    grow=st.integers(0, 3),
    programs=st.integers(1, 9),
    own_rows=st.booleans(),
    wide_v=st.booleans(),
    in_graph=st.booleans(),
)
def test_random_forests(**drawn: Any) -> None:
    check(**drawn)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31 - 1),
    requests=st.integers(1, 6),
    query_tokens=st.sampled_from([2, 3, 4, 8, 16, 20, 70, 130]),
    page_size=st.sampled_from([1, 3, 16]),
    heads=st.sampled_from([(4, 1), (4, 2), (2, 2), (6, 2), (16, 1)]),
    chunk=st.sampled_from([32, 128, 700]),
    grow=st.integers(0, 3),
    is_tree=st.booleans(),
    ragged=st.booleans(),
)
def test_several_query_tokens(**drawn: Any) -> None:
    check(**drawn)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**31 - 1),
    requests=st.integers(1, 12),
    query_tokens=st.sampled_from([1, 1, 2, 4]),
    kv_dtype=st.sampled_from(EIGHT_BITS),
    page_size=st.sampled_from([1, 3, 16]),
    lookahead=st.sampled_from([1, 2, 3]),
    heads=st.sampled_from([(4, 1), (4, 2), (2, 2), (6, 2), (16, 1)]),
    head_dim=st.sampled_from([64, 128]),
    logit_cap=st.sampled_from([0.0, 5.0]),
    sinks=st.booleans(),
    wide_v=st.booleans(),
)
def test_caches_of_eight_bits(**drawn: Any) -> None:
    check(**drawn)


@pytest.mark.parametrize("lookahead", [1, 2, 3])
def test_long_chunks_go_round_the_rings(lookahead: int) -> None:
    check(3, 6, lookahead=lookahead, longest=1500, chunk=5000)


@pytest.mark.parametrize("fault", [None, "a copy is not waited for", "spans", "ancestors", "lanes"])
def test_a_fault_shows(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
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
