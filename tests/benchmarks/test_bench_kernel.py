"""The kernel benchmark without a GPU: its workloads, inputs, reference, peers and checks."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.ceilings import Ceilings
from benchmarks.kernel import batched_reference as reference_module
from benchmarks.kernel import measure_case as run_module
from benchmarks.kernel.batched_reference import batched_reference
from benchmarks.kernel.case_inputs import lay_out, make_inputs
from benchmarks.kernel.methods import OURS, Method, Prepared, Refused, make_method
from benchmarks.kernel.methods.ours import Ours
from benchmarks.kernel.sets import Spec, read_set
from benchmarks.kernel.tree_workloads import VERIFY, Case, Workload, described, forest_from_parents
from benchmarks.kernel.verified_workloads import bits_of, seen_by
from benchmarks.papers.workloads import drafted
from deft_backend.attention.reference_attention import reference_attention, seen_tokens
from deft_backend.forest import build_forest, forest_from_page_tables

CPU = torch.device("cpu")
RAGGED = forest_from_parents([-1, 0, 0, 2, 2, -1, -1], [37, 5, 16, 9, 1, 20, 33])
"""Contexts of 37+5, 37+16+9 and 37+16+1 tokens, and two unshared requests of 20 and 33 tokens."""


def case(forest, page_size):
    return Case(Workload("own", "a tree", lambda: forest), 4, 2, page_size)


PUBLISHED = json.loads(Path(__file__).with_name("published_trees.json").read_text())
"""Requests and shares of the published tables, which round the shares."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_trees_are_the_published_ones(name):
    batches, shares = zip(*PUBLISHED[name], strict=True)
    forests = [workload.forest for workload in read_set(name, None)[1]]
    assert [forest.batch_size for forest in forests] == [*batches]
    assert [forest.share for forest in forests] == pytest.approx(shares, abs=0.0501)


@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("layout", ["shuffled", "contiguous"])
def test_page_tables_share_exactly_the_full_pages_of_the_forest(page_size, layout):
    tables = lay_out(RAGGED, page_size, layout, 3)
    found = forest_from_page_tables(tables.page_table, tables.seq_lens, page_size)
    shared = [tokens // page_size * page_size for tokens in (37, 53, 0, 0)]
    expected = build_forest(RAGGED.order, shared, RAGGED.seq_lens, page_size)
    assert tables.tokens_stored == found.tokens_stored == expected.tokens_stored
    assert found.seq_lens.tolist() == RAGGED.seq_lens.tolist()
    held = zip(tables.page_table, tables.pages_used, strict=True)
    used = {page for row, pages in held for page in row[:pages].tolist()}
    assert used <= set(range(tables.num_pages))
    in_order, no_others = used == set(range(len(used))), len(used) == tables.num_pages
    assert in_order == no_others == (layout == "contiguous")


@pytest.mark.parametrize("page_size", [1, 16])
def test_batched_reference_is_the_plain_one(page_size, monkeypatch):
    monkeypatch.setattr(reference_module, "_TILE_TOKENS", 7)
    monkeypatch.setattr(reference_module, "_TILE_BYTES", 2 * 7 * 2 * 16 * 8)  # two requests
    inputs = make_inputs(case(RAGGED, page_size), 16, torch.float32, None, CPU)
    lens = inputs.seq_lens.clone()
    lens[2] = 0
    tensors = (inputs.q, inputs.k_cache, inputs.v_cache, inputs.page_table, lens)
    torch.testing.assert_close(
        batched_reference(*tensors), reference_attention(*tensors), rtol=1e-12, atol=1e-12
    )


def test_roof_is_the_larger_of_memory_and_arithmetic():
    inputs = make_inputs(case(described("1,2 6,2").forest, 1), 16, torch.float16, None, CPU)
    moved = 10 * 2 * 2 * 16 * 2 + 2 * (2 * 4 * 16 * 2)  # 10 tokens; q and output of 2 requests
    flops = 4 * 16 * 4 * 16  # 16 tokens attended
    slow_memory, slow_products = Ceilings(1e-3, 1.0), Ceilings(1e9, 1e-6)
    assert run_module.roof_us(inputs, slow_memory) == pytest.approx(moved / 1e-3 / 1e3)
    assert run_module.roof_us(inputs, slow_products) == pytest.approx(flops / 1e-6 / 1e6)


class Fixed(Method):
    def __init__(self, name, result):
        self.name = name
        self.result = result

    def unavailable(self, device):
        return None

    def prepare(self, inputs):
        if isinstance(self.result, Exception):
            raise self.result
        out = torch.empty_like(inputs.q)
        return Prepared(lambda: out.copy_(self.result(inputs)))


def correct(inputs):
    return reference_attention(*inputs.attended)


def setup(*peers, policy="auto", kv_dtype="same"):
    spec = Spec(head_dim=64, dtype="fp16", policy=policy, kv_dtype=kv_dtype)
    absent = {"absent": "is not here"}
    return run_module.Setup(spec, Ours(OURS, policy), peers, CPU, 15, None, absent)


def test_every_result_is_checked():
    row = run_module.measure_case(
        case(RAGGED, 1),
        setup(
            Fixed("right", correct),
            Fixed("wrong", lambda inputs: correct(inputs) * 1.01),
            Fixed("broken", lambda inputs: correct(inputs) * math.nan),
            Fixed("silent", lambda inputs: torch.zeros_like(inputs.q)),
            Fixed("refusing", Refused("not this one")),
            Fixed("crashing", ValueError("first line\nsecond line")),
        ),
    )
    assert row["error"]["right"] < run_module.TOLERANCE[torch.float16]
    assert row["error"]["wrong"] == pytest.approx(0.01, rel=0.05)
    assert row["error"]["broken"] is None
    assert row["error"]["silent"] == 1.0
    skipped = row["skipped"]
    assert skipped["wrong"].startswith("wrong result: relative error 0.0")
    assert skipped["broken"] == "wrong result: relative error nan"
    assert skipped["silent"] == "wrong result: relative error 1"
    assert skipped["refusing"] == "not this one"
    assert skipped["crashing"] == "failed: ValueError: first line"
    assert skipped["absent"] == "is not here"
    assert set(row["us"].values()) == {None}
    assert row["facts"]["deft"]["workspace_bytes"] > 0
    json.dumps(row, allow_nan=False)


@pytest.mark.parametrize(("policy", "kv_dtype"), [("auto", "fp8_e4m3"), ("deft-node", "same")])
def test_ours_is_right_and_repeatable(policy, kv_dtype):
    row = run_module.measure_case(case(RAGGED, 5), setup(policy=policy, kv_dtype=kv_dtype))
    assert "deft" not in row["skipped"]
    assert row["error"]["deft"] < 1e-3
    assert row["repeatable"] is True
    assert (row["policy"], row["page_size"]) == (policy, 5)
    assert row["kv_dtype"] == ("fp16" if kv_dtype == "same" else kv_dtype)
    assert row["facts"]["deft"]["items"] > 0


def test_a_result_that_changes_from_run_to_run_is_seen():
    class Drifting(Ours):
        def prepare(self, inputs):
            prepared = super().prepare(inputs)
            calls = iter(range(1000))

            def launch():
                return prepared.launch().add_(next(calls) * 5e-4)

            return replace(prepared, launch=launch)

    row = run_module.measure_case(
        case(described("1,2 4,2").forest, 1), replace(setup(), ours=Drifting(OURS, "auto"))
    )
    assert row["repeatable"] is False


PEERS = ("flash-decoding", "deft-node-chunk", "deft-flatten", "fasttree", "flashforge")
PARENTS = (-1, 0, 0, 1, 3)
VERIFIED = {
    "drafts": drafted([Workload(VERIFY, "drafts", described("1,2,3 16,5,2").describe)], 5)[0],
    "chain": Workload(VERIFY, "chain", described("1,3 32,21").describe, 16, 5),
    "tree": Workload(VERIFY, "tree", described("1,3 32,21").describe, 16, 5, PARENTS),
}


def test_bits_say_who_sees_whom():
    seen = seen_by(PARENTS, 5)
    assert np.flatnonzero(seen[4]).tolist() == [0, 1, 3, 4]
    bits = torch.from_numpy(bits_of(seen))
    assert torch.equal(seen_tokens(5, 5, bits), torch.from_numpy(seen))


@pytest.mark.parametrize("mask", VERIFIED)
def test_verified_queries_are_right(mask):
    spec = Spec(head_dim=64, planner="device")
    peers = [make_method(name, "device") for name in PEERS] if mask == "drafts" else []
    measured = run_module.Setup(spec, Ours(OURS, "auto", "device"), peers, CPU, 15, None, {})
    row = run_module.measure_case(Case(VERIFIED[mask], 4, 2, 16), measured)
    assert all(error < 1e-3 for error in row["error"].values())
    kind = "chain" if mask == "chain" else "tree"
    assert (row["query_tokens"], row["mask"], row["skipped"]) == (5, kind, {})
    assert row["repeatable"]
