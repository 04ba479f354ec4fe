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


def test_both_planners_make_the_same_plan(step):
    """The page shows the device's arrays, and names the reference's functions beside them."""
    expected = step.reference_plan.arrays()
    for name, array in step.plan.arrays().items():
        assert array.tolist() == expected[name].tolist(), name
    scratch = step.planner._scratch
    batch = len(step.tensors.seq_lens)
    assert scratch.order[:batch].tolist() == step.forest.order.tolist()
    ranges = [next(step.grouping.segments(group)) for group in range(step.grouping.num_groups)]
    count, _, _, queries, begin, end = (array.tolist() for array in scratch.chosen)
    shared = [(queries[node], begin[node], end[node]) for node in range(count[0])]
    assert shared == [(4, 0, 2048), (2, 2048, 3072)]
    assert sum(not segment.open for segment in ranges) == 3  # two chunks of one, one of the other


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


def test_a_page_without_a_step_is_refused(step):
    with pytest.raises(ValueError, match="0 blocks for the step 'requests'"):
        written("nothing here", step.texts())
