"""The checker of contracts, with a made-up host: what it finds and what it reports."""

import sys

import pytest

from deft_backend.hosts.contract import Member, check_contract, installed_source
from deft_backend.hosts.contract.version_numbers import matches
from made_up_host import write_host, write_wheel
from tools.host_matrix.contracts import unpacked

BASE, KINDS, RUNNER = "madeup.engine.base", "madeup.kinds", "madeup.engine.runner"

PRESENT = (
    Member("madeup.engine"),
    Member(KINDS),
    *(Member(KINDS, name) for name in ("Mode.DECODE", "Mode.EXTEND", "Batch.lengths", "Batch.size",
                                       "Config.port", "FAST")),
    Member(KINDS, "Batch", ("ids", "lengths")),
    Member(KINDS, "Config", ("name", "port")),
    Member(KINDS, "Pair", ("left", "right")),
    *(Member(RUNNER, name) for name in ("DEFAULT_SIZE", "RunMode.DECODE", "base.Base.forward")),
    *(Member(RUNNER, f"Runner.{name}") for name in ("limit", "pool", "late", "config", "last",
                                                    "made")),
    Member(RUNNER, "Runner", ("config", "pool_size")),
    Member(RUNNER, "Runner.forward", ("query", "batch")),
    Member(RUNNER, "Runner.make", ("config",)),
    Member(RUNNER, "Runner.names", ("count", "prefix")),
    Member(RUNNER, "Runner.run", ("batch", "overlap")),
    Member(RUNNER, "Fast.forward", ("query",)),
    Member(RUNNER, "Fast", ("config", "device")),
    Member(RUNNER, "launch", ("runner", "port", "host")),
    Member(RUNNER, "start", ("port",)),
    Member("madeup", "EngineRunner.step", ("overlap",)),
    *(Member("madeup", name) for name in ("Mode.DECODE", "LLM", "engine.tree.Node.children")),
)  # fmt: skip

ABSENT = (
    (Member("madeup.gone"), "no such module"),
    (Member("elsewhere.gone"), "no such package"),
    (Member(RUNNER, "Walker"), "module madeup.engine.runner has no 'Walker'"),
    (Member(KINDS, "Mode.DECODED"), "class Mode has no 'DECODED'; nearest: DECODE"),
    (Member(KINDS, "Batch.length"), "class Batch has no 'length'; nearest: lengths"),
    (Member(KINDS, "Config", ("port", "host")), "no parameter 'host'; it takes (name, port)"),
    (Member(RUNNER, "Runner.step", ("batch", "async_op")), "no parameter 'async_op'; it takes"),
    (Member(RUNNER, "Runner.step", ("self",)), "no parameter 'self'"),
    (Member(RUNNER, "Runner.outsider"), "class Runner has no 'outsider'"),
    (Member(RUNNER, "launch.port"), "launch is a function"),
    (Member("madeup", "LLMs"), "module madeup has no 'LLMs'"),
    (Member("madeup", "Node"), "module madeup has no 'Node'"),
)

HIDDEN = (
    (Member("madeup.native"), None),
    (Member("madeup.native", "Core"), "madeup.native is compiled"),
    (Member(RUNNER, "Native.collect"), "madeup.native is compiled"),
    (Member(RUNNER, "Native", ("tree",)), "parameters do not stand in the source"),
    (Member(RUNNER, "Runner", ("other",)), "'other' may be one of its keyword arguments **"),
    (Member("madeup", "LLM.generate"), "madeup answers 'LLM' in __getattr__"),
    (Member("madeup", "LLM", ("model",)), "parameters do not stand in the source"),
)


@pytest.fixture
def host(tmp_path):
    with unpacked(write_wheel(tmp_path), {"madeup"}) as source:
        yield source


@pytest.mark.parametrize("member", PRESENT, ids=str)
def test_what_the_host_has_is_found(member, host):
    assert check_contract([member], host) == []


@pytest.mark.parametrize(("member", "said"), ABSENT, ids=str)
def test_what_the_host_lacks_is_a_problem_of_one_line(member, said, host):
    (problem,) = check_contract([member], host)
    assert said in problem.instead
    assert problem.readable
    assert "\n" not in str(problem)


@pytest.mark.parametrize(("member", "said"), HIDDEN, ids=str)
def test_what_the_source_does_not_tell_is_said_separately(member, said, host):
    problems = check_contract([member], host)
    assert [problem.readable for problem in problems] == ([] if said is None else [False])
    for problem in problems:
        assert said in problem.instead
        assert "cannot be read" in problem.instead


def test_a_problem_names_the_member_and_its_use(host):
    (problem,) = check_contract([Member(KINDS, "Batch.rows", use="read to group queries")], host)
    assert str(problem) == (
        "madeup.kinds: Batch.rows: class Batch has no 'rows' (our use: read to group queries)"
    )


CHANGES = (
    (BASE.replace(".", "/"), "def forward(", "def forward_step(", "Runner.forward", ()),
    (BASE.replace(".", "/"), "query, batch, **kwargs", "query", "Runner.forward", ("batch",)),
    (KINDS.replace(".", "/"), "    lengths: ", "    sizes: ", "Batch.lengths", ()),
    (BASE.replace(".", "/"), "self.last = ", "last = ", "Runner.last", ()),
    (KINDS.replace(".", "/"), "EXTEND = ", "PREFILL = ", "RunMode.EXTEND", ()),
)


@pytest.mark.parametrize(("file", "piece", "instead", "name", "parameters"), CHANGES)
def test_a_change_of_the_host_is_noticed(file, piece, instead, name, parameters, tmp_path):
    member = Member(RUNNER, name, parameters)
    assert check_contract([member], write_host(tmp_path / "as_it_was")) == []
    changed = write_host(tmp_path / "changed", {f"{file}.py": (piece, instead)})
    (problem,) = check_contract([member], changed)
    assert problem.readable


def test_members_of_other_versions_are_left_out(host):
    gone = Member(RUNNER, "Walker", versions=">=1.2,<2")
    assert check_contract([gone], host, "1.1.9") == []
    assert len(check_contract([gone], host, "1.2.0.post1+cu130")) == 1
    assert check_contract([gone], host, "2.0") == []


@pytest.mark.parametrize(
    ("version", "specifier", "expected"),
    [
        ("0.5.20", "", True), ("0.33.0", ">=0.26.0,<0.34", True),
        ("0.34.0", ">=0.26.0,<0.34", False), ("0.5.18rc0", ">=0.5.18", True),
        ("0.5.22.post1", ">=0.5.18,<0.5.22", False),
    ],
)  # fmt: skip
def test_specifiers(version, specifier, expected):
    assert matches(version, specifier) is expected


@pytest.mark.parametrize(
    ("version", "specifier"), [("new", ">=1"), ("1.0", "1.0"), ("1.0", "==1.0"), ("1.0", "<=1.0")]
)
def test_malformed_versions_are_errors(version, specifier):
    with pytest.raises(ValueError, match="expected for example"):
        matches(version, specifier)


def test_a_folder_that_is_absent_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"is not a folder; expected"):
        check_contract([Member("madeup")], tmp_path / "absent")


def test_an_installed_package_is_found_without_importing_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(write_host(tmp_path))
    assert installed_source("madeup") == tmp_path
    assert "madeup" not in sys.modules
    assert installed_source("madeup_and_absent") is None
