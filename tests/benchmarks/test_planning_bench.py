"""The planning benchmark: its batches are what it claims, and its plans are compared."""

import numpy as np
import pytest
import torch

from benchmarks import planning
from deft_backend import TreeAttention
from deft_backend.forest import forest_from_page_tables
from deft_backend.tools.tuning.launch_clock import Budget
from forest_oracle import oracle_of_tables


@pytest.mark.parametrize("page_size", [1, 16])
def test_batches_are_trees_of_the_stated_shape(page_size, monkeypatch):
    monkeypatch.setattr(planning, "FAN_OUTS", {24: (2, 3, 4)})
    tables = planning.shared(24, page_size, prefix_tokens=640)
    forest = forest_from_page_tables(tables.page_table, tables.seq_lens, page_size)
    oracle = oracle_of_tables(tables.page_table, tables.seq_lens, page_size)
    assert forest.order.tolist() == oracle["order"]
    assert forest.num_nodes == 1 + 2 + 6 + 24
    assert forest.depth[forest.leaf].tolist() == [3] * 24
    prefix = forest.start[forest.leaf]
    assert prefix.min() > 640 - page_size
    assert prefix.max() <= 640
    assert len(np.unique(forest.length[~forest.is_leaf])) > 3  # ragged


@pytest.mark.parametrize("page_size", [1, 16])
def test_planning_on_the_device_is_compared_with_the_host(page_size, monkeypatch):
    """A row, on the CPU: clocks and graphs are stand-ins, plans and outputs are real."""

    class OnCpu(TreeAttention):
        def __init__(self, **options):
            super().__init__(**{**options, "dtype": torch.float32})

    randn = torch.randn

    def random(shape, **options):
        return randn(shape, **{**options, "dtype": torch.float32})

    monkeypatch.setattr(planning, "FAN_OUTS", {8: (2, 2, 2)})
    monkeypatch.setattr(planning, "HEADS", (4, 2, 64))
    monkeypatch.setattr(planning, "TreeAttention", OnCpu)
    monkeypatch.setattr(planning, "captured", lambda launch: (launch, launch()))
    monkeypatch.setattr(planning, "launch_us", lambda replay, budget: 3.0)
    monkeypatch.setattr(planning, "kernel_times", lambda replay: {})
    monkeypatch.setattr(torch, "randn", random)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    tables = planning.shared(8, page_size, prefix_tokens=1600)
    row = planning.measure(tables, "auto", torch.device("cpu"), Budget())
    assert row["tokens_attended"] == int(tables.seq_lens.sum())
    assert row["tokens_loaded"] < 0.7 * row["tokens_attended"]
    assert 0 < row["error"] < 1e-4
    assert row["attention_us"] == {"device plan": 3.0, "reference's plan": 3.0}
    alone = planning.unshared(3, 40, page_size)
    assert len(np.unique(alone.page_table)) == alone.page_table.size
