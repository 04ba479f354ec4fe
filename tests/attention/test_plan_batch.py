"""`plan_batch` on the CPU: the reference serves whatever a plan of the device planner serves."""

import numpy as np
import pytest
import torch

from deft_backend.attention.reference_attention import reference_attention, relative_error
from deft_backend.policies import POLICY_NAMES
from deft_backend.settings.policy_names import DEFT_FLATTEN, INVARIANT
from random_batches import random_batch
from tests.support.attention_checks import tree_attention


@pytest.mark.parametrize("policy", POLICY_NAMES)
@pytest.mark.parametrize("query_tokens", [1, 3])
def test_equals_the_device_planner(policy, query_tokens):
    """Outputs of both, with every kernel launched or only those with items, and counters.

    The table's rows are in another order. Two requests hold the same pages to their end; one is
    padding. Of seed 2, each page comes in two copies, as in vLLM.
    """
    reference, device = (
        tree_attention(page_size=2, max_batch=10, policy=policy, query_tokens=query_tokens)
        for _ in range(2)
    )
    for seed in range(3):
        made = random_batch(seed, 2, 7, longest=60, spare=query_tokens)
        draw = np.random.default_rng(seed)
        rows = torch.from_numpy(draw.permutation(9))[:8]
        table = torch.zeros(9, made.page_table.shape[1], dtype=torch.int32)
        copy = torch.from_numpy(draw.integers(1 + (seed == 2), size=made.page_table.shape))
        table[rows[:7]] = made.page_table + made.num_pages * copy.int()
        lens = torch.cat((made.seq_lens + query_tokens, torch.tensor([0])))
        rows[1], lens[1] = rows[0], lens[0]
        given = {"table_rows": rows, "query_tokens": query_tokens}
        reference.plan_batch(table, lens, **given)
        device.plan_batch(table, lens, **given, on_device=True)
        # Who shares chunks or copies depends on the planner's depth-first order.
        if policy != INVARIANT and seed < 2:
            assert reference.counters[:3].tolist() == device.counters[:3].tolist()
        generator = torch.Generator().manual_seed(seed)
        caches = torch.randn(2, made.num_pages, 2, 2, 64, generator=generator)
        k_cache, v_cache = caches.repeat(1, 2, 1, 1, 1)
        # A graph may hold more requests than the plan.
        q = torch.randn(9 * query_tokens, 4, 64, generator=generator)
        want = reference_attention(q[: 8 * query_tokens], k_cache, v_cache, table[rows], lens)
        outputs = []
        runs = [(reference, static, held) for static in (False, True) for held in (8, 9)]
        for attention, static_launch, requests in [*runs, (device, True, 9)]:
            attention.poison_workspace()
            given_lens = torch.cat([lens, torch.ones(1).long()])[:requests]
            given = {"table_rows": torch.cat([rows, rows[:1]])[:requests]}
            given |= {"static_launch": static_launch}
            given_q = q[: requests * query_tokens]
            out = attention.run(given_q, k_cache, v_cache, table, given_lens, **given)
            assert relative_error(out[: len(want)], want) < 2e-6
            assert not out[len(want) :].any()
            outputs.append(out[: len(want)])
        if policy == INVARIANT:
            assert all(torch.equal(out, outputs[0]) for out in outputs)
    assert reference.counters[0] == 3
    assert reference.counters[3] > 0


@pytest.mark.parametrize("heads", [(4, 2), (40, 1)])  # the small tile holds no query of 40 vectors
@pytest.mark.parametrize("policy", POLICY_NAMES)
def test_outputs_of_empty_requests_may_stay(policy, heads):
    """Another attention computes them, in the same graph."""
    attention = tree_attention(
        num_query_heads=heads[0], num_kv_heads=heads[1], page_size=2, max_batch=32, policy=policy
    )
    stay = 0.0 if policy in (DEFT_FLATTEN, INVARIANT) else 7.0
    for seed in range(3):
        table, lens, pages = random_batch(seed, 2, 20, longest=60)
        lens[torch.from_numpy(np.random.default_rng(seed).permutation(20)[: 10 * seed])] = 0
        q, caches = torch.randn(20, heads[0], 64), torch.randn(2, pages, 2, heads[1], 64)
        for attention.skips_empty, of_empty in ((True, stay), (False, 0.0)):
            attention.poison_workspace()
            attention.plan_batch(table, lens, on_device=True)
            out = torch.full_like(q, 7.0)
            attention.run(q, *caches, table, lens, out=out, static_launch=True)
            want = reference_attention(q, *caches, table, lens)
            want[lens == 0] = of_empty
            assert relative_error(out, want) < 2e-6
            made = attention.run(q, *caches, table, lens, static_launch=True)
            assert not made[lens == 0].any()


def test_a_batch_of_no_requests():
    attention = tree_attention(max_batch=4)
    attention.plan_batch(torch.zeros(0, 3).int(), torch.zeros(0).int())
    assert attention.counters[:3].tolist() == [0, 0, 0]
    caches = torch.zeros(2, 1, 2, 64)
    assert attention.run(
        torch.zeros(0, 4, 64), *caches, torch.zeros(0, 3).int(), torch.zeros(0).int()
    ).shape == (0, 4, 64)
