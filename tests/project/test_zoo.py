"""The zoo of architectures: how answers are checked, and that the README says what was checked."""

import json
from pathlib import Path

import pytest

from deft_backend.tools.harness.answers import Answer
from integration_tests.zoo.__main__ import readme_line
from integration_tests.zoo.requests import check
from integration_tests.zoo.run import ARCHITECTURES, KEYS, layers_of_tree

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results" / "models.json"


class Counting:
    """An engine that counts on from a prompt."""

    def __init__(self):
        self.asked = []

    def answer(self, prompts, tokens):
        self.asked.append(list(prompts))
        counts = zip(prompts, tokens, strict=True)
        ids = [[prompt[-1] + at for at in range(1, count + 1)] for prompt, count in counts]
        return [Answer(ids=each, logprobs=[0.0] * len(each), top=[{}] * len(each)) for each in ids]


def test_answers_are_checked_in_one_batch_and_on_after_a_wrong_token():
    """One error is one error: what follows it is compared with what follows the checked answer."""
    engine = Counting()
    found = check(engine, [(1, 2), (5,)], [[3, 40, 41], [6, 7]], 0.0)
    assert (found.answers, found.tokens, found.ties) == (2, 5, [])
    (wrong,) = found.wrong
    assert "token 1: 40 instead of 4" in wrong
    assert engine.asked == [[(1, 2), (5,)], [(1, 2, 3, 40)]]


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
