"""The forest cascade of FlashAttention-3 against float64, with a stand-in for its kernel."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from triton.runtime.interpreter import InterpretedFunction

from benchmarks.kernel.batched_reference import batched_reference
from benchmarks.kernel.case_inputs import make_inputs
from benchmarks.kernel.methods import flash_attention3, forest_cascade, make_method
from benchmarks.kernel.methods.base import Refused
from benchmarks.kernel.tree_workloads import Case, Workload, described
from deft_backend.attention.reference_attention import relative_error
from deft_backend.forest import forest_from_paths

CPU = torch.device("cpu")
FORESTS = {
    "one root": described("1,2,8 150,20,3").forest,
    "more queries than a mask has bits": described("1,70 40,2").forest,
    "roots, loners, and a request that ends with its prefix": forest_from_paths(
        [
            [("a", 40), ("b", 48), ("c", 9)],
            [("d", 33)],
            [("a", 40), ("b", 48)],
            [("a", 40), ("e", 5)],
            [("f", 160)],
            [("f", 160), ("g", 7)],
        ],
        [97, 33, 88, 45, 160, 167],
    ),
    "nothing shared": described("3 40").forest,
}


def error_of(name, forest, heads, page_size):
    case = Case(Workload("own", "a tree", lambda: forest), *heads, page_size)
    inputs = make_inputs(case, 64, torch.float16, None, CPU)
    prepared = make_method(name).prepare(inputs)
    expected = batched_reference(*inputs.attended)
    wanted = expected if prepared.rows is None else expected[prepared.rows]
    return relative_error(prepared.launch(), wanted)


def plain_flash_attention(
    q,
    k_cache,
    v_cache,
    *,
    cache_seqlens,
    page_table,
    cu_seqlens_q,
    max_seqlen_q,
    causal,
    return_softmax_lse,
):
    """FlashAttention-3's call for groups of queries, in float64."""
    assert not causal
    assert return_softmax_lse
    out, lse = torch.empty_like(q), torch.empty(q.shape[1], len(q))
    group = q.shape[1] // k_cache.shape[2]
    for at, (begin, end) in enumerate(pairwise(cu_seqlens_q.tolist())):
        assert end - begin <= max_seqlen_q
        k, v = (
            cache[page_table[at].long()].flatten(0, 1)[: cache_seqlens[at]].double()
            for cache in (k_cache, v_cache)
        )
        k, v = (each.repeat_interleave(group, 1) for each in (k, v))
        score = torch.einsum("qhd,khd->hqk", q[begin:end].double(), k) / q.shape[-1] ** 0.5
        lse[:, begin:end] = score.logsumexp(-1)
        out[begin:end] = torch.einsum("hqk,khd->qhd", score.softmax(-1), v)
    return out, lse


@pytest.mark.parametrize("page_size", [1, 5])
def test_a_forest_cascade_reads_roots_once_and_merges(page_size, monkeypatch):
    stand_in = SimpleNamespace(flash_attn_with_kvcache=plain_flash_attention)
    monkeypatch.setattr(flash_attention3, "_package", lambda: (stand_in, "a stand-in"))
    monkeypatch.setattr(forest_cascade, "merge", InterpretedFunction(forest_cascade.merge.fn))
    *shared, alone = FORESTS.values()
    for forest in shared:
        assert error_of("fa3-cascade", forest, (4, 2), page_size) < 1e-3
    with pytest.raises(Refused, match="nothing is shared"):
        error_of("fa3-cascade", alone, (4, 2), page_size)
