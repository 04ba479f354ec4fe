"""The tool behind `make matrix`: requirements, versions, rows and the smoke suite's counts."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from deft_backend.hosts.windows import TESTED
from tools.host_matrix import releases
from tools.host_matrix.suite import Outcome, outcome_of

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("host", releases.HOSTS)
def test_the_extras_are_the_windows(host):
    text = (ROOT / "pyproject.toml").read_text()
    (extra,) = re.findall(rf'^{host} = \["{host}(.+)"\]$', text, re.MULTILINE)
    tested = TESTED[host]
    assert extra == f">={tested.lowest},<{tested.beyond}"


def test_a_suites_outcome_counts_tests_and_the_servers_steps(tmp_path):
    (tmp_path / "test_made_up.py").write_text(
        "import pytest\n"
        "@pytest.fixture\n"
        "def broken():\n    raise RuntimeError\n"
        "@pytest.fixture\n"
        "def untidy():\n    yield\n    raise RuntimeError\n"
        "@pytest.mark.parametrize('at', range(2))\n"
        "def test_good(at): pass\n"
        "def test_bad(): assert False\n"
        "def test_no_set_up(broken): pass\n"
        "def test_no_tear_down(untidy): pass\n"
        "@pytest.mark.skip\ndef test_left_out(): pass\n"
    )
    report, steps = tmp_path / "report.xml", tmp_path / "steps.jsonl"
    command = [sys.executable, "-m", "pytest", "-q", "--junitxml", report, "--rootdir", tmp_path]
    done = subprocess.run([*command, "-c", "/dev/null", tmp_path], check=False, capture_output=True)
    steps.write_text('[10, "cpu"]\n[11, "cpu"]\n')
    assert outcome_of(done.returncode, report, steps) == Outcome(1, 2, 3, 21, "cpu")
    nothing = tmp_path / "nothing"
    assert outcome_of(0, nothing, nothing) == Outcome(1, 0, 0, 0, "")
