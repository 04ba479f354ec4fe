"""The planning benchmark: what it measures is what it says, and its file."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from forest_oracle import oracle_of_tables

from deft_backend.bench import planning
from deft_backend.forest import (
    forest_from_page_tables,
    forest_from_paths,
    forest_from_tree,
)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("shuffled", [False, True])
def test_batches_are_trees_of_the_stated_shape(page_size: int, shuffled: bool) -> None:
    batch = planning.ragged_batch((2, 3, 4), page_size, shuffled, prefix_tokens=640)
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


def test_the_file_holds_a_row_a_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "FAN_OUTS", {8: (2, 2, 2)})
    monkeypatch.setattr(planning, "FLUSHED_BYTES", 1 << 12)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    try:
        planning.main(tmp_path / "new" / "planning.json", None, "deft-node", 2)
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
