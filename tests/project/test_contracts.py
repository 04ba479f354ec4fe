"""The contracts' check with a made-up host and an index that is a folder: real pip, no network."""

import sys

import pytest

from deft_backend.hosts.common.tested_versions import TestedVersions
from made_up_host import write_wheel
from tools.host_matrix import contracts as contracts_module
from tools.host_matrix.__main__ import main

# The environment's interpreter runs this. There, too, the host ``sglang`` is the made-up one.
PROGRAM = """
import sys
from deft_backend.hosts.common.tested_versions import TestedVersions
from deft_backend.hosts.common.contract import Member
from tools.host_matrix import contracts

contracts.TESTED = {"sglang": TestedVersions("Made-up", ("madeup",), "1.0", "1.2")}
contracts.contract_of = lambda host: (
    Member("madeup.engine.runner", "Runner.step", ("batch", "overlap"), use="wrapped"),
    Member("madeup.kinds", "Batch.lengths", use="read, for the plan"),
    Member("madeup.kinds", "Batch.later", versions=">=1.2", use="read"),
    Member("madeup.native", "Core"),
)
sys.exit(contracts.check("sglang"))
"""

BREAKS = {
    "renamed": {"madeup/engine/runner.py": ("def step(", "def forward_step(")},
    "dropped": {"madeup/engine/runner.py": ("batch, overlap=False", "batch")},
    "removed": {"madeup/kinds.py": ('    lengths: "Tensor" = None\n', "")},
}
SAID = {
    "renamed": "madeup.engine.runner: Runner.step: Runner has no 'step'",
    "dropped": "madeup.engine.runner: Runner.step: no parameter 'overlap'; it takes (self, batch)",
    "removed": "madeup.kinds: Batch.lengths: Batch has no 'lengths' (our use: read, for the plan)",
}


@pytest.fixture
def index(tmp_path, monkeypatch):
    folder = tmp_path / "index"
    folder.mkdir()
    for name, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(folder)}.items():
        monkeypatch.setenv(name, value)
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    tested = {"sglang": TestedVersions("Made-up", ("madeup",), "1.0", "1.2")}
    monkeypatch.setattr(contracts_module, "TESTED", tested)
    environment = tmp_path / "environment"
    (environment / "bin").mkdir(parents=True)
    (environment / "program.py").write_text(PROGRAM)
    interpreter = environment / "bin" / "python"
    interpreter.write_text(f"#!/bin/sh\nexec {sys.executable} {environment / 'program.py'}\n")
    interpreter.chmod(0o755)

    def called(*arguments):
        where = ("--host", "sglang", "--environment", str(environment))
        code = main(["contracts", *where, *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return called


def test_a_wheel_that_has_everything_passes(tmp_path, run):
    code, printed, _ = run("--wheel", str(write_wheel(tmp_path)))
    assert code == 0
    assert "✓ Made-up 1.0: 2 of 3 members hold, 1 cannot be checked here" in printed
    assert "not checked madeup.native: Core" in printed


@pytest.mark.parametrize("kind", sorted(BREAKS))
def test_a_broken_wheel_is_noticed(kind, tmp_path, run):
    code, printed, _ = run("--wheel", str(write_wheel(tmp_path, BREAKS[kind])))
    assert code == 1
    assert "✗ Made-up 1.0: 1 of 3 members hold, 1 missing, 1 cannot be checked here" in printed
    assert f"missing {SAID[kind]}" in printed


def test_versions_are_downloaded_without_dependencies(index, run):
    write_wheel(index, version="1.0")
    write_wheel(index, BREAKS["renamed"], version="1.1")
    assert run("--version", "1.0")[0] == 0
    code, printed, _ = run("--version", "1.0", "--version", "1.1")
    assert code == 1
    assert "✓ Made-up 1.0" in printed
    assert "✗ Made-up 1.1" in printed


def test_by_default_the_window_and_the_newest_are_checked(index, run):
    """A missing member outside the window is shown, but is no failure."""
    for version in ("0.9", "1.0", "1.1", "1.2", "1.3"):
        write_wheel(index, version=version)
    code, printed, _ = run()
    assert code == 0
    lines = [line for line in printed.splitlines() if "Made-up" in line]
    shown = [line.split(":")[0] for line in lines]
    assert shown == ["✓ Made-up 1.0", "✓ Made-up 1.1", "✗ Made-up 1.3"]
    assert "outside the window >=1.0, <1.2" in lines[-1]
    assert "Batch has no 'later'" in printed


def test_a_wheel_for_another_python_will_do(index, run):
    write_wheel(index, version="1.0", tag="cp312-cp312-manylinux_2_34_x86_64")
    write_wheel(index, version="1.1", tag="cp310-cp310-manylinux_2_28_x86_64")
    for version in ("1.0", "1.1"):
        code, printed, errors = run("--version", version)
        assert code == 0, errors
        assert f"Made-up {version}" in printed


def test_a_version_that_is_not_there_is_an_error(index, run):
    write_wheel(index, version="1.0")
    code, _, errors = run("--version", "1.9")
    assert code == 2
    assert "the index has no wheel of madeup 1.9; its last versions are 1.0" in errors


def test_files_that_are_no_wheel_of_a_host_are_errors(tmp_path, run):
    text = tmp_path / "notes.txt"
    text.write_text("no wheel")
    damaged = tmp_path / "madeup-1.0-py3-none-any.whl"
    damaged.write_text("no zip")
    other = tmp_path / "numpy-2.0-py3-none-any.whl"
    other.write_text("")
    for path, said in (
        (text, "is not a wheel: expected a file name such as"),
        (damaged, "cannot be read as a wheel"),
        (other, "is a wheel of numpy; expected one of"),
        (tmp_path / "absent.whl", "is no file"),
    ):
        code, _, errors = run("--wheel", str(path))
        assert code == 2
        assert said in errors


def test_an_environment_that_lacks_the_hosts_requirements_is_an_error(tmp_path, run):
    wheel = write_wheel(tmp_path)
    (tmp_path / "environment" / "program.py").write_text("import requirement_of_a_host")
    code, _, errors = run("--wheel", str(wheel))
    assert code == 2
    assert "cannot be checked with" in errors
    assert "requirement_of_a_host" in errors
