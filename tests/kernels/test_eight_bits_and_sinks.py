"""KV caches of 8 bits, and sinks: both stages against float64, over the numbers in the cache."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_kernels import DEVICES, check, random_batch, shapes_of, star

from attention_checks import tree_attention
from deft_backend import POLICY_NAMES, AttentionError, forest_from_page_tables
from deft_backend.attention.reference_attention import reference_attention, relative_error
from deft_backend.policies import GroupingBuilder, Segment

EIGHT_BITS = [torch.float8_e4m3fn, torch.float8_e5m2]
SINKS = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", POLICY_NAMES)
@settings(max_examples=9, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    requests=st.integers(1, 14),
    page_size=st.sampled_from([1, 3, 16, 64]),
    grow=st.sampled_from([0, 1, 20]),
    kv_dtype=st.sampled_from([None, *EIGHT_BITS]),
    sinks=st.sampled_from([None, *SINKS]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    on_device=st.booleans(),
    room=st.sampled_from([0, 1, 50]),
    wider=st.sampled_from([0, 9]),
)
def test_policies_on_random_forests(
    policy, device, seed, requests, page_size, grow, kv_dtype, sinks, dtype, on_device, room, wider
):
    """Caches of 16 and of 8 bits, with and without sinks."""
    batch = random_batch(seed, page_size, requests, spare=20)
    check(
        batch, policy=policy, device=device, page_size=page_size, grow=grow, kv_dtype=kv_dtype,
        sinks=sinks, dtype=dtype, scales_on_device=on_device and kv_dtype is not None, room=room,
        wider=wider,
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("head_dim", "heads"),
    [(64, (4, 4)), (96, (10, 2)), (128, (6, 1)), (256, (14, 2)), (64, (12, 1)), (96, (4, 4)),
     (128, (10, 2)), (256, (6, 1))],
)  # fmt: skip
def test_head_shapes(device, head_dim, heads):
    """GQA groups of 1, 5, 6, 7 and 12 query heads."""
    kv_dtype = EIGHT_BITS[heads[0] % 4 // 2]
    batch = star(9, 96, [3, 40, 0], 16)
    check(
        batch, device=device, head_dim=head_dim, heads=heads, page_size=16, kv_dtype=kv_dtype,
        sinks=torch.float32, dtype=torch.bfloat16, policy="deft-node",
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunks", [1, 3, 9])
@pytest.mark.parametrize(
    ("kv_dtype", "logit_cap"),
    [(None, 0.0), (None, 3.0), (EIGHT_BITS[0], 3.0), (EIGHT_BITS[1], 0.0)],
)
def test_each_way_to_an_output(device, kv_dtype, logit_cap, chunks):
    """Outputs of large tiles, of leaves, of leaves that merge, and of stage 2: one sink each."""

    def group(forest, target):
        builder = GroupingBuilder()
        for n in range(chunks):
            begin, end = n * 600 // chunks, (n + 1) * 600 // chunks
            builder.add(list(range(20)), [Segment(0, begin, end, False, 0, 20)])
        for row in range(24):
            first = 600 if row < 20 else 0
            builder.add([row], [Segment(row, first, int(forest.seq_lens[row]), True, 0, 1)])
        return builder.build()

    plan = check(
        star(24, 600, [90, 300], spare=5), device=device, grow=5, group=group, kv_dtype=kv_dtype,
        logit_cap=logit_cap, sinks=torch.float32, scales_on_device=kv_dtype is not None,
    )  # fmt: skip
    assert shapes_of(plan) == [0, 1]
    assert (len(plan.reduce_query) > 0) == (chunks > 8)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sink", [-200.0, 0.0, 200.0, float("-inf")])
def test_sinks_of_any_size_and_empty_contexts(device, sink):
    """A request without tokens gets 0, and so does one whose sink weighs everything."""
    table = torch.tensor([[0, 1, 2], [0, 1, 3], [4, 0, 0]]).int()
    lens = torch.tensor([3, 3, 0]).int()
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(*s, generator=generator).half().to(device)
               for s in ((3, 4, 64), (9, 2, 64), (9, 2, 64)))  # fmt: skip
    sinks = torch.full((4,), sink, device=device)
    attention = tree_attention(dtype=torch.float16, device=device, max_batch=3)
    attention.plan(forest_from_page_tables(table, lens))
    attention.poison_workspace()
    out = attention.run(q, k, v, table.to(device), lens.to(device), sinks=sinks)
    if sink < 0.0:  # weighs nothing
        expected = reference_attention(q, k[:, None], v[:, None], table.to(device), lens)
        assert relative_error(out, expected) <= 1e-3
    elif sink > 0.0:
        assert not out.any()
    else:
        assert out[:2].abs().min() > 0.0
    assert not out[2].any()


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
        (
            {"kv_dtype": torch.float8_e4m3fn},
            "k_cache has dtype torch.float32; expected torch.float8",
        ),
        ({"sinks": torch.zeros(3)}, r"sinks has shape \[3\] and strides \(1,\); expected \[4\]"),
        ({"sinks": torch.zeros(4).long()}, "sinks has dtype torch.int64; expected float32"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    kv_dtype = change.pop("kv_dtype", None)
    attention = tree_attention(kv_dtype=kv_dtype)
    attention.plan(forest_from_page_tables([[0, 1], [2, 3]], [1, 2]))
    cache = torch.zeros(9, 2, 64)
    with pytest.raises(AttentionError, match=message):
        attention.run(
            torch.zeros(2, 4, 64), cache, cache, torch.zeros(2, 4).int(), torch.ones(2).int(),
            **change,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("scale", "message"),
    [
        (0.0, "k_scale is 0.0; expected a number above 0"),
        (float("inf"), "k_scale is inf; expected a number above 0"),
        (torch.ones(2), r"k_scale has shape \[2\] and dtype torch.float32; expected one number"),
        (torch.ones(1).half(), "k_scale has shape"),
        (torch.ones(1, device="meta"), "k_scale is on meta; expected cpu"),
    ],
)
def test_scales_that_do_not_fit_are_refused(scale, message):
    attention = tree_attention(kv_dtype=torch.float8_e5m2)
    attention.plan(forest_from_page_tables([[0, 1], [2, 3]], [1, 2]))
    cache = torch.zeros(9, 2, 64).to(torch.float8_e5m2)
    with pytest.raises(AttentionError, match=message):
        attention.run(
            torch.zeros(2, 4, 64), cache, cache, torch.zeros(2, 4).int(), torch.ones(2).int(),
            k_scale=scale,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("k_scale", "v_scale"),
    [
        (0.5, 3.0),
        (torch.tensor([0.5]), 3.0),
        (0.5, torch.tensor([3.0])),
        (torch.tensor([0.5]), 1.0),
    ],
    ids=["numbers", "keys", "values", "one"],
)
def test_scales_on_the_host_the_device_and_on_both(k_scale, v_scale):
    attention = tree_attention(kv_dtype=torch.float8_e4m3fn, max_batch=2)
    table, lens = torch.tensor([[0, 1, 2], [0, 3, 4]]).int(), torch.tensor([3, 2]).int()
    attention.plan(forest_from_page_tables(table, lens))
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(2, 4, 64, generator=generator)
    k, v = torch.randn(2, 9, 2, 64, generator=generator).to(torch.float8_e4m3fn)
    out = attention.run(q, k, v, table, lens, k_scale=k_scale, v_scale=v_scale)
    expected = reference_attention(
        q, k[:, None], v[:, None], table, lens, k_scale=float(k_scale), v_scale=float(v_scale)
    )
    assert relative_error(out, expected) <= 2e-6


def test_other_dtypes_of_the_cache_are_refused():
    with pytest.raises(AttentionError, match="a KV cache of int8 under queries of float16; supp"):
        tree_attention(dtype=torch.float16, kv_dtype=torch.int8)
