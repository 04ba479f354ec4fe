"""The faults that `tests.support.planted_faults` plants still have a place, and tests."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAULTS = json.loads((ROOT / "tests" / "support" / "planted_faults.json").read_text())


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault["new"].strip())
def test_a_fault_fits_the_code_and_names_its_tests(fault):
    assert (ROOT / fault["file"]).read_text().count(fault["old"]) == 1
    paths = [ROOT / test.partition("::")[0] for test in fault["tests"]]
    files = [
        file for path in paths for file in ([path] if path.is_file() else path.glob("**/*.py"))
    ]
    names = "\n".join(file.read_text() for file in files)
    words = fault.get("select", "").replace("(", " ").replace(")", " ").split()
    for word in {*words} - {"and", "or", "not"}:
        assert word in names
    for test in fault["tests"]:
        assert test.partition("::")[2].partition("[")[0] in names
