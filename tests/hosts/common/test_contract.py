"""The contract with a host: its check on a made-up host, and the installed hosts' tables."""

import re
import sys
from ast import literal_eval
from dataclasses import replace
from pathlib import Path
from textwrap import dedent

import pytest

from deft_backend.hosts.common import contract
from deft_backend.hosts.windows import TESTED
from deft_backend.settings.config import Settings
from drawings import check_asked
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

GONE = contract.Member("madeup", "Walker")


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


def test_what_a_made_up_host_has_and_lacks(host):
    """A module with a member and its parameters; what a machine cannot tell proves nothing."""

    def answer(module, member=""):
        (wanted,) = contract.members_of(f"{module}\n    {member}")
        (problem,) = contract.check_contract([wanted], "1.0") or [None]
        proven = problem is not None and problem.proven
        assert contract.first_missing([wanted], "1.0") == (str(problem) if proven else None)
        said = re.sub("<object .*> is", "<object> is", str(problem))
        return [f"{'lacks' if proven else 'unknown'}: {said}" if problem else "has it"]

    check_asked(Path(__file__).with_name("members.txt"), answer)
    line = contract.first_missing([replace(GONE, use="read"), GONE], "1.0")
    assert line == "madeup: Walker: madeup has no 'Walker' (our use: read) and 1 more"


def test_members_of_other_versions_are_left_out(host):
    gone = replace(GONE, versions=">=1.2,<2")
    assert contract.check_contract([gone], "1.1.9") == []
    assert len(contract.check_contract([gone], "1.2.0.post1+cu130")) == 1
    assert contract.first_missing([gone], None) is None  # the host is not installed
    assert contract.check_contract([gone], "2.0") == []


@pytest.mark.parametrize(("value", "tries"), [("1", True), ("0", False), ("soup", False)])
def test_other_versions_are_tried_if_a_setting_says_so(value, tries, monkeypatch):
    """Others report a value that is not allowed."""
    monkeypatch.setenv("DEFT_UNTESTED_HOST", value)
    monkeypatch.setattr(contract.TestedVersions, "installed", lambda self: "0.5.16")
    assert contract.tries_others() is tries
    assert (TESTED["sglang"].refuse() is None) == tries


def test_which_versions_get_what(monkeypatch):
    """Clauses of versions, SGLang's window, and MLA: it is on in versions with a record."""
    window = TESTED["sglang"]

    def answer(what, version, *words):
        if what == "window":
            return [f"{window.holds(version)}, newer: {window.newer(version)}"]
        if what == "mla":
            device, *rest = words
            asked = True if "on" in rest else False if "off" in rest else None
            monkeypatch.setattr(
                contract.TestedVersions, "installed", lambda self: literal_eval(version)
            )
            return [str(window.leaves_mla(Settings(mla=asked), device))]
        try:
            return [str(contract.matches(version, *words or [""]))]
        except ValueError as error:
            return [str(error)]

    check_asked(Path(__file__).with_name("versions.txt"), answer)
    assert str(window) == ">=0.5.17, <0.5.24"


@pytest.mark.parametrize("host", sorted(TESTED))
def test_the_installed_host_holds_its_contract(host):
    """And lacks each of its members, and of their parameters, under another name."""
    version = TESTED[host].installed()
    if version is None:
        pytest.skip(f"{host} is not installed")
    members = [m for m in contract_of(host) if contract.matches(version, m.versions)]
    stated = [(m.module, m.name) for m in members]
    assert len(set(stated)) == len(stated)
    problems = contract.check_contract(members, version)
    assert not [str(problem) for problem in problems if problem.proven]
    hidden = {problem.member for problem in problems}
    for member in members:
        if member in hidden or not member.name:
            continue
        renamed = replace(member, name=f"{member.name}_of_the_test")
        longer = replace(member, parameters=(*member.parameters, "of_the_test"))
        assert contract.check_contract([renamed], version), member
        assert contract.check_contract([longer], version), member


def test_a_window_names_its_newest_version():
    with pytest.raises(ValueError, match=r"the window ends before 0\.6\.0; expected no 0"):
        _ = contract.TestedVersions("host", ("host",), "0.5.17", "0.6.0").newest
