"""Forests of trees that a line describes."""

import pytest

from deft_backend.tools.traces.tree_forests import forest_from_levels


def test_levels_describe_trees():
    forest = forest_from_levels("1,4,16 1024,256,32")
    assert forest.batch_size == 16
    assert forest.tokens_stored == 1024 + 4 * 256 + 16 * 32
    assert forest.share == pytest.approx(16 * (1024 + 256 + 32) / forest.tokens_stored)
    uneven = forest_from_levels("2,3 10,5")
    assert uneven.tokens_stored == 2 * 10 + 3 * 5
    assert uneven.tokens_attended == 3 * 15
