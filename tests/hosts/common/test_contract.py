"""The contract with a host: its check on a made-up host, and the installed hosts' tables."""

import subprocess
import sys
from dataclasses import replace

import pytest

from deft_backend.hosts.common.contract import Member, check_contract, first_missing, matches
from deft_backend.hosts.windows import TESTED
from made_up_host import forget_host, write_host
from tools.host_matrix.contracts import contract_of

KINDS, RUNNER = "madeup.kinds", "madeup.engine.runner"

CLASSES = "Mode.DECODE Mode.EXTEND Batch.ids Batch.lengths Batch.size Pair.right"
FIELDS = "first forward config device last limit pool late made"
PRESENT = (
    Member("madeup.engine"),
    *(Member(KINDS, name) for name in CLASSES.split()),
    *(Member(RUNNER, f"Runner.{name}") for name in FIELDS.split()),
    *(Member(RUNNER, name) for name in ["DEFAULT_SIZE", "NOTHING", "RunMode.DECODE", "base.Base"]),
    Member(KINDS, "Batch", ("ids", "lengths")),
    Member(KINDS, "Pair", ("left", "right")),
    Member(RUNNER, "Runner", ("config", "pool_size")),
    Member(RUNNER, "Runner.forward", ("query", "batch")),
    Member(RUNNER, "Runner.make", ("config",)),
    Member(RUNNER, "Runner.build", ("config",)),
    Member(RUNNER, "launch", ("runner", "port", "host")),
    Member("madeup", "EngineRunner.step", ("overlap",)),
    Member("madeup", "LLM"),
)

ABSENT = (
    (Member("madeup.gone"), "no such module"),
    (Member("elsewhere.gone"), "no such module"),
    (Member(RUNNER, "Walker"), "madeup.engine.runner has no 'Walker'"),
    (Member(RUNNER, "Runner.pools"), "Runner has no 'pools'; nearest: pool"),
    (Member(KINDS, "Mode.DECODED"), "Mode has no 'DECODED'; nearest: DECODE"),
    (Member(KINDS, "Batch.length"), "Batch has no 'length'; nearest: lengths"),
    (Member(KINDS, "Pair", ("left", "top")), "no parameter 'top'; it takes (left, right)"),
    (Member(RUNNER, "Runner.step", ("batch", "async_op")), "no parameter 'async_op'; it takes"),
    (Member(RUNNER, "launch.port"), "launch has no 'port'"),
    (Member("madeup", "LLMs"), "madeup has no 'LLMs'"),
)

UNKNOWN = (
    (Member("madeup.native", "Core"), "import fails (ModuleNotFoundError("),
    (Member("madeup.broken"), "import fails (OSError('no GPU'))"),
    (Member(RUNNER, "Runner", ("other",)), "no parameter 'other'"),
    (Member(RUNNER, "Runner.config", ("tree",)), "its parameters are unknown"),
)


@pytest.fixture
def host(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(write_host(tmp_path))
    yield
    forget_host()


@pytest.mark.parametrize("member", PRESENT, ids=str)
def test_what_the_host_has_is_found(member, host):
    assert check_contract([member], "1.0") == []


@pytest.mark.parametrize(("member", "said"), ABSENT, ids=str)
def test_what_the_host_lacks_is_a_problem_of_one_line(member, said, host):
    (problem,) = check_contract([member], "1.0")
    assert said in problem.instead
    assert problem.proven
    assert "\n" not in str(problem)


@pytest.mark.parametrize(("member", "said"), UNKNOWN, ids=str)
def test_what_this_machine_cannot_tell_proves_nothing(member, said, host):
    (problem,) = check_contract([member], "1.0")
    assert said in problem.instead
    assert not problem.proven
    assert first_missing([member], "1.0") is None


CHANGES = (
    ("madeup/engine/base.py", "def forward(", "def forward_step(", "Runner.forward", ()),
    ("madeup/engine/base.py", "query, batch, **kwargs", "query", "Runner.forward", ("batch",)),
    ("madeup/kinds.py", "    lengths: ", "    sizes: ", "Batch.lengths", ()),
    ("madeup/engine/base.py", "self.last = ", "last = ", "Runner.last", ()),
    ("madeup/kinds.py", "EXTEND = ", "PREFILL = ", "RunMode.EXTEND", ()),
)


@pytest.mark.parametrize(("file", "piece", "instead", "name", "parameters"), CHANGES)
def test_a_change_of_the_host_is_noticed(
    file, piece, instead, name, parameters, tmp_path, monkeypatch
):
    member = Member(RUNNER, name, parameters)
    monkeypatch.syspath_prepend(write_host(tmp_path, {file: (piece, instead)}))
    try:
        (problem,) = check_contract([member], "1.0")
    finally:
        forget_host()
    assert problem.proven


def test_members_of_other_versions_are_left_out(host):
    gone = Member(RUNNER, "Walker", versions=">=1.2,<2")
    assert check_contract([gone], "1.1.9") == []
    assert len(check_contract([gone], "1.2.0.post1+cu130")) == 1
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


@pytest.mark.parametrize("host", sorted(TESTED))
def test_tables_of_data_need_no_host(host):
    """Reading a contract imports neither the host nor torch."""
    program = (
        "import sys\n"
        "from tools.host_matrix.contracts import contract_of\n"
        f"assert contract_of({host!r})\n"
        "print(*{'sglang', 'vllm', 'torch'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("host", sorted(TESTED))
def test_each_member_says_what_we_do_with_it(host):
    members = contract_of(host)
    assert not [str(member) for member in members if not member.use]
    stated = [(m.module, m.name, m.versions) for m in members]
    assert len(set(stated)) == len(stated)


@pytest.mark.parametrize("host", sorted(TESTED))
def test_the_installed_host_holds_its_contract(host):
    """And lacks each of its members, and of their parameters, under another name."""
    version = TESTED[host].installed()
    if version is None:
        pytest.skip(f"{host} is not installed")
    members = [m for m in contract_of(host) if matches(version, m.versions)]
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
