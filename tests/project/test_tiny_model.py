"""The tiny model in ``models/tiny-llama``: the properties that the demo and the tests need."""

import pytest

from integration_tests.common.server import MODEL, Ask

pytest.importorskip("transformers", reason="the model is read through transformers")

CONFIDENT = -0.31
"""Log-probability of a token whose logit exceeds every other one by 1. Neighbouring bfloat16 values
are at most 1/8 apart at the size of these logits, so rounding in any attention changes no token."""

ANSWERS = {
    "Sort the digits 8 2 5 1.": "1 2 5 8.",
    "The town of Galdry stands on": (
        "the river Sorrel. Its ruler is Duke Hale. "
        "The people of Galdry sell boats and eat seed bread."
    ),
}


@pytest.mark.parametrize(("prompt", "expected"), ANSWERS.items(), ids=("sort", "town"))
def test_greedy_answers_are_right_and_confident(prompt, expected):
    from integration_tests.common.plain_model import PlainModel

    ((answer,),) = PlainModel(MODEL).answers([Ask(prompt, len(expected) + 1)])
    assert answer.text.strip() == expected
    assert min(answer.logprobs) > CONFIDENT
