"""docs/walkthrough.md shows the code's own results, and its batch uses every path."""

import pytest
import torch

from deft_backend.planner.encoding import OPEN_END
from examples import walkthrough
from examples.walkthrough import PAGE, Step, written


@pytest.fixture(scope="module")
def step():
    return Step.run()


def test_the_page_shows_the_numbers_of_the_script(step):
    page = PAGE.read_text(encoding="utf-8")
    assert written(page, step.texts()) == page, (
        "docs/walkthrough.md is out of date; run: python -m examples.walkthrough --write, "
        "and read the sentences around the numbers that changed"
    )


def test_tree_attention_is_attention(step):
    torch.testing.assert_close(step.out.double(), step.reference, rtol=0, atol=1e-5)


def test_the_cheapest_chunks_are_chosen(step):
    """The page's sentences about prices."""
    chunks, cost, tokens = (array.tolist() for array in step.planner._scratch.candidates)
    half = len(chunks)
    small, large = cost[:half], cost[half:]
    assert (chunks[small.index(min(small))], chunks[large.index(min(large))]) == (1, 2)
    assert tokens[half + large.index(min(large))] == 1024


def test_the_batch_meets_every_path(step):
    """The page's statements about the numbers."""
    small, large, masked = (step.plan.items_of(shape) for shape in range(3))
    assert large == (0, 2)
    assert small == (2, 8)
    assert masked[0] == masked[1]
    slots = step.plan.entry_slot
    assert (slots == walkthrough.DIRECT).sum() == 1
    assert (slots <= walkthrough.MERGES).sum() == 2
    assert step.plan.reduce_query.tolist() == [2, 4]
    first, second = (next(step.grouping.segments(group)) for group in (0, 1))
    assert (first.start, first.end, second.start, second.end) == (0, 1024, 1024, 2048)
    assert (step.plan.segment_end == OPEN_END).sum() == 5
