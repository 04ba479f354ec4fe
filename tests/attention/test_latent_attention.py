"""MLA over plans, with a stand-in for the host's kernel, against float64 request by request."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deft_backend import forest_from_page_tables
from deft_backend.attention.reference_attention import reference_attention, relative_error
from deft_backend.attention.self_check import failed_latent_check
from deft_backend.costs.cost_model import STEP_NS
from deft_backend.kernels.latent import plain_latent_attention
from tests.support.attention_checks import latent_attention
from tests.support.strategies import Batch, batches

VALUE, ROPE = 64, 16  # of the tests on the CPU
DIMS = {"value_dim": VALUE, "rope_dim": ROPE}
SCALE = 0.11
RECORDS = Path(__file__).parents[2] / "docs/results"


class Counted:
    """The stand-in. Of an empty range it gives `empty` and any output."""

    def __init__(self, empty=float("-inf")):
        self.empty_ranges = 0
        self._empty = empty

    def __call__(self, call):
        out, lse = plain_latent_attention(call)
        empty = lse == float("-inf")
        self.empty_ranges += int(empty.sum())
        out[empty.T] = float("nan")
        return out, lse.masked_fill(empty, self._empty)


def expected(q_nope, q_rope, cache, table, lens):
    """The reference pads values to the width of keys: [T, H, value_dim] float64."""
    keys = cache.unsqueeze(2)
    value, rope = q_nope.shape[-1], q_rope.shape[-1]
    values = torch.nn.functional.pad(cache[..., :value], (0, rope)).unsqueeze(2)
    q = torch.cat([q_nope, q_rope], dim=-1)
    return reference_attention(q, keys, values, table, lens, sm_scale=SCALE)[..., :value]


def check(batch, heads, query_tokens, *, how, grow=0, padding=0, empty=float("-inf")):
    """Plan, grow, lay out, run a layer of poisoned memory, and compare with float64."""
    kernel = Counted(empty)
    requests = len(batch.seq_lens)
    size = {"page_size": batch.page_size, "max_batch": max(1, requests + padding)}
    kind = {"num_query_heads": heads, "query_tokens": query_tokens, "kernel": kernel}
    attention = latent_attention(**size, **kind, **DIMS)
    table = torch.from_numpy(batch.page_tables)
    # The query tokens follow what the requests share.
    lens = torch.from_numpy(batch.seq_lens) + query_tokens
    if how != "forest":
        attention.plan_batch(table, lens + grow, on_device=None if how == "batch" else True)
        assert attention.counters[:2].tolist() == [1, int((lens + grow).sum())]
    else:
        planned = Batch(batch.page_tables, lens.numpy(), batch.page_size)
        attention.plan(planned.forest())
        rows = torch.cat([torch.arange(requests), torch.zeros(padding, dtype=torch.int64)])
        padded = torch.cat([lens + grow, torch.ones(padding, dtype=lens.dtype)])
        attention.lay_out(padded, table_rows=rows)
    generator = torch.Generator().manual_seed(int(lens.sum()) + heads)
    tokens = (requests + padding) * query_tokens
    pages = int(table.max()) + 1 if table.numel() else 1
    q_nope = torch.randn(tokens, heads, VALUE, generator=generator)
    q_rope = torch.randn(tokens, heads, ROPE, generator=generator)
    cache = torch.randn(pages, batch.page_size, VALUE + ROPE, generator=generator)
    out = torch.full_like(q_nope, float("nan"))
    attention.run(q_nope, q_rope, cache, table, sm_scale=SCALE, out=out)
    real = requests * query_tokens
    want = expected(q_nope[:real], q_rope[:real], cache, table, lens + grow)
    assert not out.isnan().any()
    if real:
        assert relative_error(out[:real], want) < 2e-6
    return kernel


@settings(max_examples=10)
@given(
    batch=batches(),
    heads=st.sampled_from([1, 5, 8, 20, 32]),
    tokens=st.sampled_from([1, 1, 3]),
    how=st.sampled_from(["forest", "batch", "device"]),
    grow=st.integers(0, 20),
    padding=st.integers(0, 3),
)
def test_equals_attention_request_by_request(batch, heads, tokens, how, grow, padding):
    if heads * tokens <= 32:
        padding = padding if how == "forest" else 0
        check(batch, heads, tokens, how=how, grow=grow, padding=padding)


@pytest.mark.parametrize("empty", [float("-inf"), float("inf")])
def test_an_empty_range_weighs_nothing(empty):
    """Requests of equal tokens have empty leaves; kernels give them either infinity."""
    table = np.arange(6000, dtype=np.int32)[None].repeat(4, axis=0)
    kernel = check(Batch(table, np.full(4, 5900, np.int32), 1), 8, 1, how="forest", empty=empty)
    assert kernel.empty_ranges == 4 * 8


@pytest.mark.parametrize(
    ("at", "off", "most"),
    [(None, 0.0, 4), (1, 0.5, 4), (3, float("nan"), 4), (None, 0.0, 2), (0, 0.5, 2)],
)
def test_the_check_at_start_names_a_wrong_result(at, off, most):
    """Chains call the kernel for nodes and for leaves, over the plan of each planner."""
    calls = []

    def kernel(call):
        out, lse = plain_latent_attention(call)
        calls.append(call)
        return (out + off if len(calls) - 1 == at else out), lse

    kind = {"num_query_heads": 8, "query_tokens": 2, "kernel": kernel}
    attention = latent_attention(max_batch=most, **kind, **DIMS)
    said = failed_latent_check(attention)
    assert len(calls) == 6
    assert (said is None) == (at is None), said
    assert said is None or "other results than float64" in said


def recorded(row, heads, tokens, own):
    """An attention of a recorded batch, and the plan and forest of it."""
    requests, shared = row["requests"], row["shared"] // 64
    pages = shared + torch.arange(requests * own // 64).view(requests, -1)
    table = torch.cat([torch.arange(shared).expand(requests, -1), pages], 1).int()
    lens = torch.full((requests,), row["shared"] + own)
    forest = forest_from_page_tables(table, lens, page_size=64)
    attention = latent_attention(
        num_query_heads=heads, page_size=64, max_batch=requests, query_tokens=tokens
    )
    return attention, attention.plan(forest), forest


@pytest.mark.parametrize("layers", [27, 61], ids=["V2-Lite", "V3"])
def test_the_costs_decide_recorded_batches_as_measured(layers):
    """Where a row says that the host's kernel was faster, the host decodes; nowhere else."""
    measured, decided = [], []
    for row in json.loads((RECORDS / "mla-h100.json").read_text(encoding="utf-8"))["rows"]:
        if "deft" in row["us"]:
            attention, *made = recorded(row, row["heads"], row["query_tokens"], row["own"])
            decided.append(attention.loses(*made, layers))
            assert attention.gains(made[1], layers) != decided[-1]
            measured.append(row["us"]["deft"] + STEP_NS / 1e3 / layers >= row["us"]["host"])
    assert decided == measured
    assert set(measured) == {True, False}
