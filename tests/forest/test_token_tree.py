"""Ancestor bits from a host's links, against a walk up the tree."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deft_backend.forest.token_tree import ancestors_of_links, words_of
from forest_oracle import links_of


def attended(bits):
    """The tokens that each token of a request [n, W] attends to."""
    return [
        {64 * word + bit for word, value in enumerate(row) for bit in range(64) if value >> bit & 1}
        for row in bits.tolist()
    ]


@st.composite
def trees(draw):
    tokens = draw(st.sampled_from([1, 2, 5, 12, 64, 65, 130]))
    deep = draw(st.booleans())
    return [
        [-1, *(draw(st.integers(max(0, t - 2) if deep else 0, t - 1)) for t in range(1, tokens))]
        for _ in range(draw(st.integers(1, 3)))
    ]


@given(trees())
@example([[-1]])
@example([[-1, *range(63)]])  # one word of ancestors, full
@example([[-1, *range(64)], [-1] + [0] * 64])  # a chain and a star; the last token in a second word
@example([[-1, *range(129)], [-1, *(token // 2 for token in range(129))]])  # three words
@settings(max_examples=40, deadline=None)
def test_every_token_attends_to_its_ancestors_and_itself(forest):
    found = ancestors_of_links(*links_of(forest))
    assert found.shape == (len(forest), len(forest[0]), words_of(len(forest[0])))
    for parents, bits in zip(forest, found, strict=True):
        expected = []
        for token, parent in enumerate(parents):
            expected.append({token} | (expected[parent] if parent >= 0 else set()))
        assert attended(bits) == expected


@pytest.mark.parametrize("tokens", [4, 70])
def test_tokens_without_links_attend_to_themselves(tokens):
    """A graph's padding requests have no links."""
    none = torch.full((2, tokens), -1)
    assert attended(ancestors_of_links(none, none)[1]) == [{token} for token in range(tokens)]
