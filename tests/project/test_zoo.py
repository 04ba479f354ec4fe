"""The zoo of architectures: what logs say, and that the README says what was checked."""

import json
from pathlib import Path

import pytest

from integration_tests.zoo.__main__ import readme_line
from integration_tests.zoo.run import ARCHITECTURES, KEYS, layers_of_tree

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results" / "models.json"


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
    rows = json.loads(RESULTS.read_text())["rows"]
    for row in rows:
        assert set(KEYS) <= set(row), row
        if row["tokens_checked"]:
            assert row["layers_tree"] == ARCHITECTURES[row["architecture"]].tree, row
    assert readme_line(rows) in (ROOT / "README.md").read_text()
