"""A small selection of the faults, which share one server.

`python -m integration_tests.faults` injects all of them.
"""

import pytest

from integration_tests.faults.run import Harness

SELECTED = {"files", "poison", "planner", "sigkill"}


@pytest.mark.rare
def test_faults_end_in_right_answers(tmp_path):
    """As docs/reliability.md promises."""
    rows = Harness(tmp_path, 1).run(SELECTED)
    assert {row["fault"] for row in rows} == SELECTED
    assert [row for row in rows if not row["ok"]] == []
