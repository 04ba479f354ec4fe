"""The last batch of a server with the device planner, shown on request."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from sglang_fakes import make_state
from typer.testing import CliRunner

from benchmarks.random_batches import random_batch
from deft_backend.cli import app
from deft_backend.forest import forest_from_page_tables
from deft_backend.telemetry import shown_batch
from deft_backend.telemetry.shown_batch import Batch, ShownBatchError, forest_of, request_file
from deft_backend.telemetry.state import StateWriter
from deft_backend.telemetry.state_reader import StateError, shown_forest


@given(
    seed=st.integers(0, 2**31 - 1),
    requests=st.integers(1, 20),
    page_size=st.sampled_from([1, 3, 16]),
    padding=st.integers(0, 3),
    by_row=st.booleans(),
)
def test_it_is_the_forest_of_the_requests(
    seed: int, requests: int, page_size: int, padding: int, by_row: bool
) -> None:
    """Padding requests are not shown: they have one token, or none."""
    made = random_batch(seed, requests, page_size, longest=60)
    order = np.random.RandomState(seed).permutation(requests)
    order = order[made.seq_lens[order] > 1]
    requests = len(order)
    assume(requests)
    if by_row:  # SGLang: rows of a larger table; padding has row 0 and one token
        table = np.full((requests + 2, made.page_table.shape[1]), -1, dtype=np.int32)
        rows = np.random.RandomState(seed + 1).permutation(requests + 2)[:requests]
        table[rows] = made.page_table[order]
        lens = np.concatenate([made.seq_lens[order], np.ones(padding, dtype=np.int64)])
        batch = Batch(
            torch.from_numpy(table), torch.from_numpy(lens), page_size,
            torch.from_numpy(np.concatenate([rows, np.full(padding, rows[0])])),
        )  # fmt: skip
    else:  # vLLM: one row for each request; padding has no tokens
        table = np.zeros((requests + padding, made.page_table.shape[1]), dtype=np.int32)
        table[:requests] = made.page_table[order]
        lens = np.concatenate([made.seq_lens[order], np.zeros(padding, dtype=np.int64)])
        batch = Batch(torch.from_numpy(table), torch.from_numpy(lens), page_size)
    found = forest_of(batch)
    expected = forest_from_page_tables(made.page_table[order], made.seq_lens[order], page_size)
    for name in ("order", "parent", "start", "length", "query_begin", "query_end", "seq_lens"):
        assert np.array_equal(getattr(found, name), getattr(expected, name)), name


def test_what_cannot_be_shown_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    table, lens = torch.zeros((2, 4), dtype=torch.int32), torch.tensor([3, 4])
    with pytest.raises(ShownBatchError, match="no batch has been planned on the device yet"):
        forest_of(None)
    with pytest.raises(ShownBatchError, match="had no requests"):
        forest_of(Batch(table, torch.zeros_like(lens), 1))
    monkeypatch.setattr(shown_batch, "LIMIT", 7)
    with pytest.raises(ShownBatchError, match="2 requests of up to 4 pages are too many"):
        forest_of(Batch(table, lens, 1))


def test_a_server_answers_once_for_each_question(tmp_path: Path) -> None:
    state = make_state()
    writer = StateWriter(state, tmp_path)
    writer.look()
    assert [p.name for p in tmp_path.iterdir()] == [writer.path.name]  # no request
    request_file(writer.path).touch()
    writer.look()
    answer = shown_batch.answer_file(writer.path)
    assert "no batch has been planned" in json.loads(answer.read_text())["error"]
    assert not request_file(writer.path).exists()
    answer.unlink()
    writer.look()
    assert not answer.exists()


def test_explain_shows_the_batch_of_a_server_that_plans_on_the_device(tmp_path: Path) -> None:
    state = make_state()
    state.batch = Batch(torch.tensor([[1, 2, 3, 0], [1, 2, 4, 5]]), torch.tensor([3, 4]), 1)
    state.count_tree(7, 5, 1)
    writer = StateWriter(state, tmp_path)
    writer.start()
    result = CliRunner().invoke(
        app, ["explain", "--server", "1", "--json"], env={"DEFT_STATE_DIR": str(tmp_path)}
    )
    assert result.exit_code == 0, result.stderr
    content = json.loads(result.stdout)
    assert (content["tokens_stored"], content["batch_size"]) == (5, 2)
    assert not request_file(writer.path).exists()

    state.batch = None
    with pytest.raises(StateError, match="no batch to show: ShownBatchError: no batch has"):
        shown_forest(writer.path)


def test_a_server_that_is_gone_is_said(tmp_path: Path) -> None:
    path = tmp_path / "1-tp0.json"
    with pytest.raises(StateError, match=r"did not say within 0 s .* still running"):
        shown_forest(path, timeout=0.2)
    assert not list(tmp_path.iterdir())
