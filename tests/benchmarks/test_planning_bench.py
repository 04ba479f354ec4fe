"""The planning benchmark: its measurements are what it claims, and its file is correct."""

import json
import os

import numpy as np
import pytest
import torch

from benchmarks.planning import device_planning, host_planning
from deft_backend import TreeAttention
from deft_backend.forest import forest_from_page_tables, forest_from_paths, forest_from_tree
from deft_backend.tools.tuning.launch_clock import Budget
from forest_oracle import oracle_of_tables


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("shuffled", [False, True])
def test_batches_are_trees_of_the_stated_shape(page_size, shuffled):
    batch = host_planning.ragged_batch((2, 3, 4), page_size, shuffled, prefix_tokens=640)
    lens = batch.seq_lens
    forest = forest_from_page_tables(batch.page_tables, lens, page_size)
    for other in (
        forest_from_paths(batch.paths, lens, page_size),
        forest_from_tree(batch.parent, batch.depth, batch.holder, lens, page_size),
    ):
        assert other.order.tolist() == forest.order.tolist()
        assert other.start.tolist() == forest.start.tolist()
    assert forest.order.tolist() == oracle_of_tables(batch.page_tables, lens, page_size)["order"]
    assert (len(lens), forest.num_nodes) == (24, 1 + 2 + 6 + 24)
    assert forest.depth[forest.leaf].tolist() == [3] * 24
    prefix = forest.start[forest.leaf]
    assert prefix.min() > 640 - page_size
    assert prefix.max() <= 640
    assert len(np.unique(forest.length[~forest.is_leaf])) > 3  # ragged


def test_beams_fork_from_each_other_in_every_step():
    tables = device_planning.beams(16, 40, steps=12)
    forest = forest_from_page_tables(tables.page_table, tables.seq_lens, tables.page_size)
    assert forest.order.tolist() == oracle_of_tables(tables.page_table, tables.seq_lens, 1)["order"]
    assert len(set(tables.page_table[:, -1])) == 16  # each beam wrote a token of its own
    assert forest.depth[forest.leaf].max() >= 3
    inner = forest.length[~forest.is_leaf]
    assert sorted(inner)[-1] >= 40
    assert np.median(inner) <= 4


def test_the_file_holds_a_row_a_batch(tmp_path, monkeypatch):
    monkeypatch.setattr(host_planning, "FAN_OUTS", {8: (2, 2, 2)})
    monkeypatch.setattr(host_planning, "FLUSHED_BYTES", 1 << 12)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    try:
        host_planning.measure_batches(tmp_path / "new" / "planning.json", None, "deft-node", 2)
    finally:
        if cores is not None:
            os.sched_setaffinity(0, cores)
    found = json.loads((tmp_path / "new" / "planning.json").read_text())
    assert found["header"]["policy"] == "deft-node"
    assert found["header"]["versions"]["numba"]
    assert [(row["requests"], row["page_size"], row["order"]) for row in found["rows"]] == [
        (8, 1, "depth first"), (8, 1, "shuffled"), (8, 16, "depth first"), (8, 16, "shuffled"),
    ]  # fmt: skip
    for row in found["rows"]:
        assert row["nodes"] == row["groups"] == 15
        times = [value for key, value in row.items() if key.endswith("_ms")]
        assert len(times) == 7
        assert min(times) > 0


@pytest.mark.parametrize("page_size", [1, 16])
def test_planning_on_the_device_is_compared_with_the_host(page_size, monkeypatch):
    """A row, on the CPU: clocks and graphs are stand-ins, plans and outputs are real."""

    class OnCpu(TreeAttention):
        def __init__(self, **options):
            super().__init__(**{**options, "dtype": torch.float32})

    randn = torch.randn

    def random(shape, **options):
        return randn(shape, **{**options, "dtype": torch.float32})

    monkeypatch.setattr(device_planning, "FAN_OUTS", {8: (2, 2, 2)})
    monkeypatch.setattr(device_planning, "HEADS", (4, 2, 64))
    monkeypatch.setattr(device_planning, "TreeAttention", OnCpu)
    monkeypatch.setattr(device_planning, "captured", lambda launch: (launch, launch()))
    monkeypatch.setattr(device_planning, "launch_us", lambda replay, budget: 3.0)
    monkeypatch.setattr(device_planning, "kernel_times", lambda replay: {})
    monkeypatch.setattr(torch, "randn", random)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    tables = device_planning.shared(8, page_size, prefix_tokens=1600)
    row = device_planning.measure(tables, "auto", torch.device("cpu"), Budget())
    assert row["tokens_attended"] == int(tables.seq_lens.sum())
    assert row["tokens_loaded"] < 0.7 * row["tokens_attended"]
    assert 0 < row["error"] < 1e-4
    assert row["attention_us"] == {"device plan": 3.0, "host plan": 3.0}
    alone = device_planning.unshared(3, 40, page_size)
    assert len(np.unique(alone.page_table)) == alone.page_table.size
