"""The fault harness: its verdicts, its planted faults, and the page drawn from its record."""

from pathlib import Path

from benchmarks.row_files import read_rows
from integration_tests.faults.__main__ import drawn_into
from integration_tests.faults.run import is_ok
from integration_tests.faults.tested_server import verdict

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs" / "results" / "faults-cpu.json"
PAGE = ROOT / "docs" / "reliability.md"

COUNTS = {"right": 6, "wrong": 0, "lost": 0, "cut": 0}
GOOD = {"fault": "poison", "host": "vllm", "injected": 3, **COUNTS, "after": COUNTS}


def test_only_right_answers_to_a_fault_that_happened_are_as_promised():
    assert is_ok(GOOD)
    for change in (
        {"injected": 0},
        {"wrong": 1},
        {"lost": 1},
        {"processes_left": 1},
        {"link_followed": True},
        {"after": {"wrong": 1, "lost": 0, "cut": 0}},
        {"cut": 1},
        {"injected": {"poison": 1, "flush": 0}},
    ):
        assert not is_ok({**GOOD, **change}), change
    assert is_ok({**GOOD, "fault": "sigkill", "lost": 6})
    assert not is_ok({**GOOD, "fault": "sigkill", "wrong": 1})


def test_tokens_that_came_before_a_cut_are_judged():
    tokens = ([1, 2, 3], [1, 2], [1, 9], [], [1, 2, 3, 4])
    found = [verdict(ids, [1, 2, 3]) for ids in tokens]
    assert found == ["right", "cut", "wrong", "lost", "wrong"]


def test_the_page_shows_the_record():
    rows, _ = read_rows(RECORD, ("fault", "host", "ok", "run"), "faults")
    assert drawn_into(PAGE.read_text(), rows) == PAGE.read_text(), (
        "run: python -m integration_tests.faults --draw --out docs/results/faults-cpu.json"
    )
