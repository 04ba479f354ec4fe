"""docs/walkthrough.md shows the code's own results, and its batch uses every path."""

from examples.walkthrough import PAGE, Step, written


def test_the_page_shows_the_numbers_of_the_script_and_both_planners_make_them():
    """The page has the device planner's arrays, and the names of the reference's functions."""
    step, page = Step.run(), PAGE.read_text(encoding="utf-8")
    assert written(page, step.texts()) == page, (
        "docs/walkthrough.md is out of date; run: python -m examples.walkthrough --write, "
        "and read the sentences around the numbers that changed"
    )
    expected = step.reference_plan.arrays()
    for name, array in step.plan.arrays().items():
        assert array.tolist() == expected[name].tolist(), name
