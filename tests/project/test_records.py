"""The fault harness and the zoo of architectures: verdicts, logs, and pages drawn from records."""

import json
from pathlib import Path

import pytest

from benchmarks.row_files import read_rows
from integration_tests.faults.__main__ import PAGE, drawn_into
from integration_tests.faults.run import is_ok
from integration_tests.faults.tested_server import verdict
from integration_tests.zoo.__main__ import readme_line
from integration_tests.zoo.run import ARCHITECTURES, KEYS, layers_of_tree

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"

COUNTS = {"right": 6, "wrong": 0, "lost": 0, "cut": 0}
GOOD = {"fault": "poison", "host": "vllm", "injected": 3, **COUNTS, "after": COUNTS}


def test_only_right_answers_to_a_fault_that_happened_are_as_promised():
    assert is_ok(GOOD)
    for change in (
        {"injected": 0},
        {"wrong": 1},
        {"lost": 1},
        {"processes_left": 1},
        {"link_followed": True},
        {"after": {"wrong": 1, "lost": 0, "cut": 0}},
        {"cut": 1},
        {"injected": {"poison": 1, "flush": 0}},
    ):
        assert not is_ok({**GOOD, **change}), change
    assert is_ok({**GOOD, "fault": "sigkill", "lost": 6})
    assert not is_ok({**GOOD, "fault": "sigkill", "wrong": 1})


def test_tokens_that_came_before_a_cut_are_judged():
    tokens = ([1, 2, 3], [1, 2], [1, 9], [], [1, 2, 3, 4])
    found = [verdict(ids, [1, 2, 3]) for ids in tokens]
    assert found == ["right", "cut", "wrong", "lost", "wrong"]


def test_the_page_shows_the_record():
    rows, _ = read_rows(RESULTS / "faults-cpu.json", ("fault", "host", "ok", "run"), "faults")
    assert drawn_into(PAGE.read_text(), rows) == PAGE.read_text(), (
        "run: python -m integration_tests.faults --draw --out docs/results/faults-cpu.json"
    )


@pytest.mark.parametrize(
    ("log", "tree"),
    [
        ("deft: decode goes through tree attention (policy auto)", 4),
        ("deft: decode of 4 layers goes through tree attention (policy auto)", 4),
        (
            "deft: decode goes through tree attention\ndeft: 1 of 4 layers decode through tree "
            "attention; 3 with a sliding window through the host's kernels",
            1,
        ),
        ("deft: decode goes through tree attention\ndeft: a kernel failed, the host's own", 0),
        ("deft: MLA models are not supported; all attention runs through the host's own", 0),
        ("nothing of ours", 0),
    ],
)
def test_the_log_says_how_many_layers_it_decodes(log, tree):
    assert layers_of_tree(log, 4) == tree


def test_the_readme_names_the_architectures_that_were_checked():
    """If this fails after a run, put the expected line into the README's table."""
    rows = json.loads((RESULTS / "models.json").read_text())["rows"]
    for row in rows:
        assert set(KEYS) <= set(row), row
        if row["tokens_checked"]:
            assert row["layers_tree"] == ARCHITECTURES[row["architecture"]].tree, row
    assert readme_line(rows) in (ROOT / "README.md").read_text()
