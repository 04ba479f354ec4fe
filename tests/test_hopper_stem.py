"""The Hopper kernel without a GPU: what it computes, through an emulation of its language."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import gluon_emulator
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deft_backend import TreeAttention, forest_from_page_tables
from deft_backend.bench.random_forest import random_batch
from deft_backend.kernels import hopper_stem
from deft_backend.kernels.launch import STEM_ATTENTION
from deft_backend.reference import reference_attention, relative_error


def stem_attention(
    programs: int, arguments: Any, constants: dict[str, Any], *, num_warps: int, **_: Any
) -> None:
    gluon_emulator.run(
        hopper_stem, "stem_attention", programs, arguments, constants, num_warps=num_warps
    )
    launched.append(programs)


launched: list[int] = []
"""Programs of each launch since the test began."""


@pytest.fixture(autouse=True, scope="module")
def emulation() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(STEM_ATTENTION, "launch", stem_attention)
        yield


def with_stems(attention: TreeAttention, lookahead: int, block: int) -> None:
    """Let the Hopper kernel run the middle tile shape of an attention on the CPU."""
    small, stem, packed = attention._config.tiles
    stem = replace(stem, block_tokens=block, lookahead=lookahead, num_warps=4, programs=3)
    attention._config = replace(attention._config, tiles=(small, stem, packed))


def check(
    seed: int, requests: int, page_size: int = 1, lookahead: int = 1, logit_cap: float = 0.0,
    heads: tuple[int, int] = (4, 1), head_dim: int = 64, grow: int = 0, block: int = 32,
    longest: int = 200,
) -> None:  # fmt: skip
    batch = random_batch(seed, requests, page_size, longest=longest, spare=grow)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(torch.float16)

    q = normal(requests, heads[0], head_dim)
    k_cache, v_cache = normal(2, batch.num_pages, page_size, heads[1], head_dim)
    attention = TreeAttention(
        num_query_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, dtype=torch.float16,
        device="cpu", page_size=page_size, max_batch=requests, policy="fasttree",
    )  # fmt: skip
    with_stems(attention, lookahead, block)
    table, lens = torch.from_numpy(batch.page_table), torch.from_numpy(batch.seq_lens)
    attention.plan(forest_from_page_tables(table, lens, page_size, num_pages=batch.num_pages))
    attention.poison_workspace()
    out = torch.full_like(q, float("nan"))
    attention.run(q, k_cache, v_cache, table, lens + grow, logit_cap=logit_cap, out=out)
    expected = reference_attention(q, k_cache, v_cache, table, lens + grow, logit_cap=logit_cap)
    assert out.isfinite().all()
    assert relative_error(out, expected) <= 1e-3


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31 - 1),
    requests=st.integers(3, 24),
    page_size=st.sampled_from([1, 3, 16]),
    lookahead=st.sampled_from([1, 2, 3]),
    heads=st.sampled_from([(4, 1), (4, 2), (2, 2), (6, 2)]),
    grow=st.integers(0, 3),
    block=st.sampled_from([32, 64]),
)
def test_random_forests(
    seed: int, requests: int, page_size: int, lookahead: int, heads: tuple[int, int], grow: int,
    block: int,
) -> None:  # fmt: skip
    """A block as long as a tile has rows lets Q share a V block's memory."""
    check(seed, requests, page_size, lookahead, heads=heads, grow=grow, block=block)


@pytest.mark.parametrize(
    ("heads", "head_dim", "logit_cap"), [((8, 2), 128, 0.0), ((8, 2), 128, 20.0), ((4, 1), 64, 5.0)]
)
def test_head_dimensions_and_soft_caps(
    heads: tuple[int, int], head_dim: int, logit_cap: float
) -> None:
    launched.clear()
    check(1, 12, 16, heads=heads, head_dim=head_dim, logit_cap=logit_cap)
    assert launched


@pytest.mark.parametrize("lookahead", [1, 2, 3, 4])
def test_long_segments_go_round_the_rings(lookahead: int) -> None:
    check(3, 6, lookahead=lookahead, longest=1500)


@pytest.mark.parametrize("late", [0, 1])
def test_a_copy_that_is_not_waited_for_shows(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulation can fail: with one group more on its way, the products read NaN."""
    wait = gluon_emulator._MACHINE.wait
    module = gluon_emulator.emulated(hopper_stem)
    monkeypatch.setattr(module, "wait_group", lambda outstanding: wait(outstanding + late))
    if late:
        with pytest.raises(AssertionError):
            check(1, 12)
    else:
        check(1, 12)
