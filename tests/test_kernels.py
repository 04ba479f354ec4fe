"""Both kernels against float64 attention, over random forests, poisoned outputs and fresh data.

Runs interpreted on the CPU; with a GPU, the compiled kernels run the same tests.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deft_backend import POLICY_NAMES, AttentionError, TreeAttention, forest_from_page_tables
from deft_backend.bench.random_forest import random_batch as paged_batch
from deft_backend.planner import PlanCapacity
from deft_backend.reference import reference_attention, relative_error

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}


class Batch(NamedTuple):
    """Page tables of a random forest, as tensors on the CPU."""

    page_table: torch.Tensor
    seq_lens: torch.Tensor
    num_pages: int


def random_batch(
    seed: int, page_size: int, requests: int, longest: int = 90, spare: int = 0
) -> Batch:
    made = paged_batch(seed, requests, page_size, longest=longest, spare=spare)
    return Batch(torch.from_numpy(made.page_table), torch.from_numpy(made.seq_lens), made.num_pages)


def check(
    batch: Batch,
    *,
    policy: str = "auto",
    dtype: torch.dtype = torch.float16,
    device: str = "cpu",
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    page_size: int = 1,
    logit_cap: float = 0.0,
    grow: int = 0,
    sm_scale: float | None = None,
) -> None:
    """Plan, let sequences grow by `grow` tokens, run, and hold the result against float64."""
    query_heads, kv_heads = heads
    generator = torch.Generator().manual_seed(int(batch.seq_lens.sum()) + head_dim)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    requests = len(batch.seq_lens)
    q = normal(requests, query_heads, head_dim)
    k_cache = normal(batch.num_pages, page_size, kv_heads, head_dim)
    v_cache = normal(batch.num_pages, page_size, kv_heads, head_dim)
    attention = TreeAttention(
        num_query_heads=query_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        page_size=page_size,
        max_batch=max(1, requests),
        policy=policy,
    )
    attention.plan(
        forest_from_page_tables(
            batch.page_table, batch.seq_lens, page_size, num_pages=batch.num_pages
        )
    )
    # Poison: anything read before it was written, or never written, shows.
    attention.poison_workspace()
    out = torch.full_like(q, float("nan"))
    lens = (batch.seq_lens + grow).to(device)
    table = batch.page_table.to(device)
    attention.run(q, k_cache, v_cache, table, lens, logit_cap=logit_cap, sm_scale=sm_scale, out=out)
    reference = reference_attention(
        q, k_cache, v_cache, table, lens, logit_cap=logit_cap, sm_scale=sm_scale
    )
    assert not out.isnan().any()
    assert relative_error(out, reference) <= TOLERANCE[dtype]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", POLICY_NAMES)
@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    requests=st.integers(1, 14),
    page_size=st.sampled_from([1, 3, 16]),
    grow=st.sampled_from([0, 1, 20]),
)
def test_policies_on_random_forests(
    policy: str, device: str, seed: int, requests: int, page_size: int, grow: int
) -> None:
    batch = random_batch(seed, page_size, requests, spare=20)
    check(batch, policy=policy, device=device, page_size=page_size, grow=grow)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (8, 1)], ids=["MHA", "GQA", "MQA"])
def test_head_shapes_and_dtypes(
    device: str, head_dim: int, dtype: torch.dtype, heads: tuple[int, int]
) -> None:
    check(
        random_batch(head_dim + heads[0], 16, 9),
        device=device, head_dim=head_dim, dtype=dtype, heads=heads, page_size=16,
    )  # fmt: skip


def test_float32_on_the_cpu() -> None:
    check(random_batch(3, 1, 10), dtype=torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("page_size", [1, 5, 16, 64])
def test_page_sizes(device: str, page_size: int) -> None:
    check(random_batch(page_size, page_size, 10), device=device, page_size=page_size)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", ["auto", "deft-flatten"])
def test_logit_soft_cap_and_scale(device: str, policy: str) -> None:
    check(random_batch(8, 1, 8), device=device, policy=policy, logit_cap=3.0, sm_scale=0.9)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", ["deft-node", "deft-flatten", "fasttree"])
def test_more_queries_than_a_tile_or_a_mask_word(device: str, policy: str) -> None:
    """150 queries: several tiles of 128 rows, and masks of more than 64 bits."""
    batch = random_batch(21, 1, 150, longest=12)
    check(batch, device=device, policy=policy, heads=(2, 2))


@pytest.mark.parametrize("device", DEVICES)
def test_large_scores_do_not_overflow(device: str) -> None:
    check(random_batch(5, 1, 6), device=device, sm_scale=40.0, dtype=torch.bfloat16)


@pytest.mark.parametrize("device", DEVICES)
def test_same_batch_gives_equal_bits(device: str) -> None:
    batch = random_batch(13, 1, 12)
    torch.manual_seed(0)
    q = torch.randn(12, 4, 64).to(device, torch.float16)
    kv = torch.randn(2, batch.num_pages, 2, 64).to(device, torch.float16)
    results = []
    for _ in range(2):
        attention = TreeAttention(
            num_query_heads=4, num_kv_heads=2, head_dim=64, dtype=q.dtype, device=device,
            max_batch=12, policy="deft-node-chunk",
        )  # fmt: skip
        attention.plan(forest_from_page_tables(batch.page_table, batch.seq_lens))
        results.append(
            attention.run(q, kv[0], kv[1], batch.page_table.to(device), batch.seq_lens.to(device))
        )
    assert torch.equal(results[0], results[1])


@pytest.mark.parametrize("device", DEVICES)
def test_strided_caches_table_rows_and_int64_lengths(device: str) -> None:
    """A server's layout: K and V interleaved in one buffer, requests anywhere in a larger table."""
    batch = random_batch(17, 1, 7)
    torch.manual_seed(1)
    q = torch.randn(7, 4, 64).to(device, torch.float16)
    kv = torch.randn(batch.num_pages, 2, 2, 64).to(device, torch.float16)
    rows = torch.tensor([11, 3, 0, 7, 5, 2, 9])
    table = torch.zeros(12, batch.page_table.shape[1] + 5, dtype=torch.int32)
    table[rows, : batch.page_table.shape[1]] = batch.page_table
    attention = TreeAttention(
        num_query_heads=4, num_kv_heads=2, head_dim=64, dtype=q.dtype, device=device, max_batch=7
    )
    attention.plan(forest_from_page_tables(batch.page_table, batch.seq_lens))
    out = attention.run(
        q, kv[:, 0], kv[:, 1], table.to(device), batch.seq_lens.long().to(device),
        table_rows=rows.to(device),
    )  # fmt: skip
    reference = reference_attention(
        q, kv[:, :1], kv[:, 1:], batch.page_table.to(device), batch.seq_lens
    )
    assert relative_error(out, reference) <= TOLERANCE[torch.float16]


def test_empty_batch() -> None:
    attention = TreeAttention(
        num_query_heads=2, num_kv_heads=2, head_dim=64, dtype=torch.float16, device="cpu"
    )
    attention.plan(forest_from_page_tables(np.zeros((0, 1), dtype=int), []))
    cache = torch.zeros(4, 2, 64, dtype=torch.float16)
    out = attention.run(
        torch.empty(0, 2, 64, dtype=torch.float16), cache, cache,
        torch.zeros(1, 4, dtype=torch.int32), torch.empty(0, dtype=torch.int32),
    )  # fmt: skip
    assert out.shape == (0, 2, 64)


def test_a_plan_too_large_for_its_arrays_becomes_one_that_fits() -> None:
    """Node by node wants more items than these arrays hold; the answer stays right."""
    batch = random_batch(2, 1, 30, longest=20)
    forest = forest_from_page_tables(batch.page_table, batch.seq_lens)
    attention = TreeAttention(
        num_query_heads=2, num_kv_heads=2, head_dim=64, dtype=torch.float32, device="cpu",
        policy="deft-node", capacity=PlanCapacity(30, 33, 33, 33, 0),
    )  # fmt: skip
    assert forest.num_nodes > 33
    plan = attention.plan(forest)
    assert plan.num_items <= 33
    torch.manual_seed(2)
    q = torch.randn(30, 2, 64)
    k, v = torch.randn(2, batch.num_pages, 2, 64)
    out = attention.run(q, k, v, batch.page_table, batch.seq_lens)
    reference = reference_attention(q, k[:, None], v[:, None], batch.page_table, batch.seq_lens)
    assert relative_error(out, reference) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 80}, "head dimension 80; supported are 64, 96, 128, 256"),
        ({"num_kv_heads": 3}, "4 query heads over 3 KV heads"),
        ({"dtype": torch.int8}, "dtype int8; supported are"),
        ({"device": "meta"}, "device meta"),
        ({"page_size": 0}, "page_size is 0"),
        ({"max_batch": 0}, "max_batch is 0"),
        ({"policy": "deft"}, "deft-node"),
        ({"num_query_heads": 256, "num_kv_heads": 1}, "256 query heads share a KV head"),
    ],
)
def test_unsupported_attention_is_refused(change: dict[str, object], message: str) -> None:
    arguments: dict[str, object] = {
        "num_query_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.float16,
        "device": "cpu",
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        TreeAttention(**(arguments | change))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": torch.zeros(3, 4, 64)}, r"q has shape \[3, 4, 64\]; expected \[2, 4, 64\]"),
        ({"q": torch.zeros(2, 4, 64).half()}, "q has dtype torch.float16; expected torch.float32"),
        ({"k_cache": torch.zeros(9, 1, 64)}, r"k_cache has shape \[9, 1, 1, 64\]"),
        ({"v_cache": torch.zeros(9, 2, 128)[..., ::2]}, "v_cache has stride 2"),
        ({"seq_lens": torch.tensor([1])}, "seq_lens holds 1 lengths; expected 2"),
        ({"seq_lens": torch.tensor([1.0, 2.0])}, "seq_lens has dtype torch.float32"),
        ({"page_table": torch.zeros(4, dtype=torch.int32)}, "page_table has shape"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(change: dict[str, torch.Tensor], message: str) -> None:
    attention = TreeAttention(
        num_query_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float32, device="cpu"
    )
    tensors = {
        "q": torch.zeros(2, 4, 64), "k_cache": torch.zeros(9, 2, 64),
        "v_cache": torch.zeros(9, 2, 64), "page_table": torch.zeros(2, 4, dtype=torch.int32),
        "seq_lens": torch.tensor([1, 2]),
    }  # fmt: skip
    with pytest.raises(AttentionError, match="nothing is planned"):
        attention.run(**tensors)
    attention.plan(forest_from_page_tables([[0, 1], [2, 3]], [1, 2]))
    with pytest.raises(AttentionError, match=message):
        attention.run(**(tensors | change))
