"""The contracts' check with a made-up host and an index that is a folder: real pip, no network."""

import pytest

from deft_backend.hosts.common import tested_versions
from deft_backend.hosts.contract import Member
from made_up_host import write_wheel
from tools.host_matrix import contracts as contracts_module
from tools.host_matrix.__main__ import main

CONTRACT = (
    Member("madeup.engine.runner", "Runner.step", ("batch", "overlap"), use="wrapped"),
    Member("madeup.kinds", "Batch.lengths", use="read, for the plan"),
    Member("madeup.kinds", "Batch.later", versions=">=1.2", use="read"),
    Member("madeup.native", "Core"),
)

BREAKS = {
    "renamed": {"madeup/engine/runner.py": ("def step(", "def forward_step(")},
    "dropped": {"madeup/engine/runner.py": ("batch, overlap=False", "batch")},
    "removed": {"madeup/kinds.py": ('    lengths: "Tensor" = None\n', "")},
}
SAID = {
    "renamed": "madeup.engine.runner: Runner.step: class Runner has no 'step'",
    "dropped": "madeup.engine.runner: Runner.step: no parameter 'overlap'; it takes (batch)",
    "removed": "madeup.kinds: Batch.lengths: class Batch has no 'lengths' "
    "(our use: read, for the plan)",
}


@pytest.fixture(autouse=True)
def made_up(monkeypatch):
    """The host ``sglang`` is the made-up one; its window is >=1.0, <1.2."""
    tested = {"sglang": tested_versions.TestedVersions("Made-up", ("madeup",), "1.0", "1.2")}
    monkeypatch.setattr(contracts_module, "TESTED", tested)
    monkeypatch.setattr(contracts_module, "contract_of", lambda host: CONTRACT)


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
def run(capsys):
    def called(*arguments):
        code = main(["contracts", *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return called


def test_a_wheel_that_has_everything_passes(tmp_path, run):
    code, printed, _ = run("--wheel", str(write_wheel(tmp_path)))
    assert code == 0
    assert "✓ Made-up 1.0: 2 of 3 members hold, 1 cannot be read" in printed
    assert "not read madeup.native: Core" in printed


@pytest.mark.parametrize("kind", sorted(BREAKS))
def test_a_broken_wheel_is_noticed(kind, tmp_path, run):
    whole = write_wheel(tmp_path / "whole")
    assert run("--wheel", str(whole))[0] == 0
    broken = write_wheel(tmp_path / "broken", BREAKS[kind])
    code, printed, _ = run("--wheel", str(broken))
    assert code == 1
    assert "✗ Made-up 1.0: 1 of 3 members hold, 1 missing, 1 cannot be read" in printed
    assert f"missing {SAID[kind]}" in printed


def test_versions_are_downloaded_without_dependencies(index, run):
    write_wheel(index, version="1.0")
    write_wheel(index, BREAKS["renamed"], version="1.1")
    assert run("--host", "sglang", "--version", "1.0")[0] == 0
    code, printed, _ = run("--host", "sglang", "--version", "1.0", "--version", "1.1")
    assert code == 1
    assert "✓ Made-up 1.0" in printed
    assert "✗ Made-up 1.1" in printed


def test_by_default_the_window_and_the_newest_are_checked(index, run):
    """A missing member outside the window is shown, but is no failure."""
    for version in ("0.9", "1.0", "1.1", "1.2", "1.3"):
        write_wheel(index, version=version)
    code, printed, _ = run("--host", "sglang")
    assert code == 0
    lines = [line for line in printed.splitlines() if "Made-up" in line]
    assert [line.split(":")[0] for line in lines] == [
        "✓ Made-up 1.0", "✓ Made-up 1.1", "✗ Made-up 1.3"
    ]  # fmt: skip
    assert "outside the window >=1.0, <1.2" in lines[-1]
    assert "class Batch has no 'later'" in printed


def test_a_wheel_for_another_python_will_do(index, run):
    write_wheel(index, version="1.0", tag="cp312-cp312-manylinux_2_34_x86_64")
    write_wheel(index, version="1.1", tag="cp310-cp310-manylinux_2_28_x86_64")
    for version in ("1.0", "1.1"):
        code, printed, errors = run("--host", "sglang", "--version", version)
        assert code == 0, errors
        assert f"Made-up {version}" in printed


def test_a_version_that_is_not_there_is_an_error(index, run):
    write_wheel(index, version="1.0")
    code, _, errors = run("--host", "sglang", "--version", "1.9")
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
        (tmp_path / "absent.whl", "does not exist"),
    ):
        code, _, errors = run("--wheel", str(path))
        assert code == 2
        assert said in errors
