"""The contract with a host: its check on a made-up host, and the installed hosts' tables."""

import sys
from dataclasses import replace
from textwrap import dedent

import pytest

from deft_backend.hosts.common.contract import (
    Member,
    TestedVersions,
    check_contract,
    first_missing,
    matches,
    tries_others,
)
from deft_backend.hosts.windows import TESTED
from deft_backend.settings.config import Settings
from tools.host_matrix.contracts import contract_of

SOURCE = """
    import enum
    from dataclasses import dataclass

    class Mode(enum.IntEnum):
        DECODE = 1

    @dataclass
    class Batch:
        ids: list
        lengths: "Tensor" = None

    class Base:
        first: int

        def __init__(self, config, *, device="cuda"):
            self.config = config

        def forward(self, query, batch, **kwargs):
            self.last = query

        @classmethod
        def make(cls, config):
            cls.made = True

    class Runner(Base):
        limit = 0

        def __init__(self, config, pool_size=4, **extra):
            super().__init__(config)
            if extra:
                self.pool: dict = {}

                def later():
                    self.late = True

        def step(self, batch, overlap=False):
            return batch

    def launch(runner, /, port, *, host="localhost"):
        pass

    LAZY = {"LLM": None}

    def __getattr__(name):
        try:
            return LAZY[name]
        except KeyError:
            raise AttributeError(name)
"""

NAMES = "Mode.DECODE Batch.ids Batch.lengths launch LLM"
FIELDS = "first forward config last limit pool late made"
PRESENT = (
    *(Member("madeup", name) for name in ["", *NAMES.split()]),
    *(Member("madeup", f"Runner.{name}") for name in FIELDS.split()),
    Member("madeup", "Batch", ("ids", "lengths")),
    Member("madeup", "Runner", ("config", "pool_size")),
    Member("madeup", "Runner.forward", ("query", "batch")),
    Member("madeup", "Runner.make", ("config",)),
    Member("madeup", "launch", ("runner", "port", "host")),
)
ABSENT = (
    (Member("madeup.gone"), "no such module"),
    (Member("elsewhere.gone"), "no such module"),
    (Member("madeup", "Walker"), "madeup has no 'Walker'"),
    (Member("madeup", "Runner.pools"), "Runner has no 'pools'"),
    (Member("madeup", "Mode.DECODED"), "Mode has no 'DECODED'"),
    (Member("madeup", "Batch", ("ids", "top")), "no parameter 'top'; it takes (ids, lengths)"),
    (Member("madeup", "Runner.step", ("batch", "async_op")), "no parameter 'async_op'; it takes"),
    (Member("madeup", "launch.port"), "launch has no 'port'"),
)
UNKNOWN = (
    (Member("madeup.native", "Core"), "import fails (ModuleNotFoundError("),
    (Member("madeup.broken"), "import fails (OSError('no GPU'))"),
    (Member("madeup", "Runner", ("other",)), "no parameter 'other'"),
    (Member("madeup", "Runner.config", ("tree",)), "its parameters are unknown"),
)


@pytest.fixture
def host(tmp_path, monkeypatch):
    folder = tmp_path / "madeup"
    folder.mkdir()
    (folder / "__init__.py").write_text(dedent(SOURCE))
    (folder / "native.py").write_text("import madeup_extension_of_a_gpu")
    (folder / "broken.py").write_text("raise OSError('no GPU')")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "madeup"]:
        del sys.modules[name]


@pytest.mark.parametrize("member", PRESENT, ids=str)
def test_what_the_host_has_is_found(member, host):
    assert check_contract([member], "1.0") == []


@pytest.mark.parametrize(("member", "said"), ABSENT, ids=str)
def test_what_the_host_lacks_is_a_problem_of_one_line(member, said, host):
    (problem,) = check_contract([member], "1.0")
    assert said in problem.instead
    assert problem.proven
    assert "\n" not in str(problem)
    line = first_missing([*PRESENT, replace(member, use="read"), member], "1.0")
    assert line.startswith(f"{member}: ")
    assert line.endswith(" (our use: read) and 1 more")


@pytest.mark.parametrize(("member", "said"), UNKNOWN, ids=str)
def test_what_this_machine_cannot_tell_proves_nothing(member, said, host):
    (problem,) = check_contract([member], "1.0")
    assert said in problem.instead
    assert not problem.proven
    assert first_missing([member], "1.0") is None


def test_members_of_other_versions_are_left_out(host):
    gone = Member("madeup", "Walker", versions=">=1.2,<2")
    assert check_contract([gone], "1.1.9") == []
    assert len(check_contract([gone], "1.2.0.post1+cu130")) == 1
    assert first_missing([gone], None) is None  # the host is not installed
    assert check_contract([gone], "2.0") == []


@pytest.mark.parametrize(
    ("version", "specifier", "expected"),
    [
        ("0.5.20", "", True),
        ("0.33.0", ">=0.26.0,<0.34", True),
        ("0.34.0", ">=0.26.0,<0.34", False),
        ("0.5.18rc0", ">=0.5.18", True),
        ("0.5.22.post1", ">=0.5.18,<0.5.22", False),
    ],
)
def test_specifiers(version, specifier, expected):
    assert matches(version, specifier) is expected


@pytest.mark.parametrize("specifier", ["==1", "<=1", ">1", "1", ">=one"])
def test_a_specifier_of_another_form_is_refused(specifier):
    with pytest.raises(ValueError, match="expected for example"):
        matches("1.0", specifier)


@pytest.mark.parametrize(
    ("version", "holds", "newer"),
    [
        ("0.5.16.post9", False, "0.5.23"),
        ("0.5.17rc1", True, "0.5.23"),
        ("0.5.22.1", True, "0.5.23"),
        ("0.5.23", True, None),
        ("0.5.24rc1", False, None),
    ],
)
def test_a_window_of_versions(version, holds, newer):
    assert (TESTED["sglang"].holds(version), TESTED["sglang"].newer(version)) == (holds, newer)
    assert str(TESTED["sglang"]) == ">=0.5.17, <0.5.24"


@pytest.mark.parametrize(("value", "tries"), [("1", True), ("0", False), ("soup", False)])
def test_other_versions_are_tried_if_a_setting_says_so(value, tries, monkeypatch):
    """Others report a value that is not allowed."""
    monkeypatch.setenv("DEFT_UNTESTED_HOST", value)
    monkeypatch.setattr(TestedVersions, "installed", lambda self: "0.5.16")
    assert tries_others() is tries
    assert (TESTED["sglang"].refuse() is None) == tries


@pytest.mark.parametrize(
    ("asked", "version", "device", "drafts", "left"),
    [
        (None, "0.5.17.post1", "cuda", True, None),
        (None, "0.5.17", "cpu", False, "no record shows MLA models with tree attention on cpu and"),
        (None, "0.5.18", "cuda", False, "cuda and SGLang 0.5.18; DEFT_MLA=1 tries it"),
        (None, "0.5.23", "cuda", False, None),
        (None, "0.5.23", "cuda", True, "no record shows MLA models that draft with tree attention"),
        (None, "0.5.24", "cuda", False, "DEFT_MLA=1 tries it"),
        (None, None, "cuda", False, "DEFT_MLA=1 tries it"),
        (True, "0.5.23", "cpu", True, None),
        (False, "0.5.17", "cuda", False, "DEFT_MLA=0 leaves MLA models to the host's backend"),
    ],
)
def test_mla_is_on_in_versions_with_a_record(asked, version, device, drafts, left, monkeypatch):
    monkeypatch.setattr(TestedVersions, "installed", lambda self: version)
    reason = TESTED["sglang"].leaves_mla(Settings(mla=asked), device, drafts=drafts)
    assert reason is None if left is None else left in str(reason)


@pytest.mark.parametrize("host", sorted(TESTED))
def test_the_installed_host_holds_its_contract(host):
    """And lacks each of its members, and of their parameters, under another name."""
    version = TESTED[host].installed()
    if version is None:
        pytest.skip(f"{host} is not installed")
    members = [m for m in contract_of(host) if matches(version, m.versions)]
    stated = [(m.module, m.name) for m in members]
    assert len(set(stated)) == len(stated)
    problems = check_contract(members, version)
    assert not [str(problem) for problem in problems if problem.proven]
    hidden = {problem.member for problem in problems}
    for member in members:
        if member in hidden or not member.name:
            continue
        renamed = replace(member, name=f"{member.name}_of_the_test")
        longer = replace(member, parameters=(*member.parameters, "of_the_test"))
        assert check_contract([renamed], version), member
        assert check_contract([longer], version), member
