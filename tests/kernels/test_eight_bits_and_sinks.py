"""KV caches of 8 bits, and sinks: both stages against float64, over the numbers in the cache."""

import pytest
import torch
from test_kernels import DEVICES, check, chunks_and_leaves, shapes_of, star

from attention_checks import tree_attention
from deft_backend import AttentionError, forest_from_page_tables

EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2]
WIDE = torch.zeros(9, 2, 64)


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k_scale": 2.0}, "k_scale is given, but the KV cache has the dtype of the queries"),
        ({"v_scale": torch.ones(1)}, "v_scale is given, but the KV cache"),
        ({"k_cache": WIDE}, "k_cache has dtype torch.float32; expected torch.float8"),
        ({"sinks": torch.zeros(3)}, r"sinks has shape \[3\]; expected \[4\]"),
        ({"sinks": torch.zeros(4).long()}, "sinks has dtype torch.int64; expected torch.float32"),
        ({"k_scale": 0.0}, "k_scale is 0.0; expected a number above 0"),
        ({"k_scale": float("inf")}, "k_scale is inf; expected a number above 0"),
        ({"k_scale": torch.ones(2)}, r"k_scale has shape \[2\]; expected \[1\]"),
        ({"k_scale": torch.ones(1).half()}, "k_scale has dtype torch.float16"),
        ({"k_scale": torch.ones(1, device="meta")}, "k_scale is on meta; expected cpu"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    """Scales are given where the cache has 16 bits, and do not fit where it has 8."""
    kv_dtype = None if "KV cache" in message else torch.float8_e4m3fn
    attention = tree_attention(kv_dtype=kv_dtype)
    attention.plan(forest_from_page_tables([[0, 1], [2, 3]], [1, 2]))
    cache = WIDE if kv_dtype is None else WIDE.to(kv_dtype)
    given = {"q": torch.zeros(2, 4, 64), "k_cache": cache, "v_cache": cache, **change}
    with pytest.raises(AttentionError, match=message):
        attention.run(page_table=torch.zeros(2, 4).int(), seq_lens=torch.ones(2).int(), **given)


def test_other_dtypes_of_the_cache_are_refused():
    with pytest.raises(AttentionError, match="a KV cache of int8 under queries of float16; supp"):
        tree_attention(dtype=torch.float16, kv_dtype=torch.int8)
