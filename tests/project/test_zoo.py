"""The zoo of architectures: how answers are checked, and that the README says what was checked."""

import json
from pathlib import Path

import pytest

from benchmarks.e2e.answers import TOLERANCE
from deft_backend.tools.harness.answers import Answer
from integration_tests.zoo.__main__ import readme_line
from integration_tests.zoo.requests import check
from integration_tests.zoo.run import ARCHITECTURES, KEYS, layers_of_tree

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results" / "models.json"


class Counting:
    """An engine that counts on from a prompt; `close` names tokens that are almost as likely."""

    def __init__(self, close=None):
        self._close = close or {}
        self.asked = []

    def answer(self, prompts, tokens):
        self.asked.append(list(prompts))
        found = []
        for prompt, count in zip(prompts, tokens, strict=True):
            ids = [prompt[-1] + at for at in range(1, count + 1)]
            top = [{token: -0.5, **{other: -0.5 - gap for other, gap in self._close.items()}}
                   for token in ids]  # fmt: skip
            found.append(Answer(ids=ids, logprobs=[-0.5] * count, top=list(top)))
        return found


def counts(verdict):
    return verdict["tokens"], verdict["wrong"], verdict["ties"]


def test_equal_answers_are_checked_in_one_batch():
    engine = Counting()
    verdict = check(engine, [(1, 2), (5,)], [[3, 4, 5], [6, 7]], "float32")
    assert counts(verdict) == (5, 0, 0)
    assert engine.asked == [[(1, 2), (5,)]]


def test_a_check_goes_on_after_a_different_token():
    """The rest is compared with what follows the checked answer, so one error is one error."""
    engine = Counting()
    verdict = check(engine, [(1, 2)], [[3, 40, 41, 42]], "bfloat16")
    assert counts(verdict) == (4, 1, 0)
    assert "answer 0, token 1: 40 instead of 4" in verdict["first_wrong"][0]
    assert engine.asked[1] == [(1, 2, 3, 40)]


@pytest.mark.parametrize(
    ("dtype", "gap", "wrong"), [("bfloat16", 0.2, 0), ("bfloat16", 0.3, 1), ("float32", 1e-6, 1)]
)
def test_a_tie_is_decided_by_the_dtype(dtype, gap, wrong):
    verdict = check(Counting({40: gap}), [(1, 2)], [[3, 40]], dtype)
    assert counts(verdict)[1:] == (wrong, 1 - wrong)


@pytest.mark.parametrize(
    ("log", "tree"),
    [
        ("deft: decode goes through tree attention (policy auto)", 4),
        ("deft: decode of 4 layers goes through tree attention (policy auto)", 4),
        ("deft: decode goes through tree attention\ndeft: 1 of 4 layers decode through tree "
         "attention; 3 with a sliding window through the host's kernels", 1),
        ("deft: decode goes through tree attention\ndeft: a kernel failed, the host's own", 0),
        ("deft: MLA models are not supported; all attention runs through the host's own", 0),
        ("nothing of ours", 0),
    ],
)  # fmt: skip
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


def test_a_cache_of_8_bits_has_wider_ties():
    gap = 2.5 * TOLERANCE["bfloat16"]
    for kv_dtype, expected in ((None, (1, 0)), ("fp8_e4m3", (0, 1))):
        found = check(Counting({40: gap}), [(1, 2)], [[3, 40, 41]], "bfloat16", kv_dtype)
        assert counts(found)[1:] == expected
