"""KV caches of 8 bits, and sinks: both stages against float64, over the numbers in the cache."""

import pytest
import torch
from test_kernels import DEVICES, check, chunks_and_leaves, shapes_of, star

from attention_checks import tree_attention
from deft_backend import forest_from_page_tables

EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2]


@pytest.mark.parametrize("device", DEVICES)
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
