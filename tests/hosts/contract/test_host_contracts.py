"""The contract of the installed host: it holds, and the checker looks at each member.

The test replaces each member's name, and each parameter's, in the host's source. The checker must
then report that the member is missing.
"""

import re
import subprocess
import sys
from functools import cache

import pytest

from deft_backend.hosts.contract import check_contract, installed_source
from deft_backend.hosts.contract.source import HostFiles
from deft_backend.hosts.contract.version_numbers import matches
from deft_backend.hosts.windows import TESTED
from tools.host_matrix.contracts import contract_of


def installed_members():
    """The contracts' members for the installed hosts and their versions."""
    found = []
    for host, tested in TESTED.items():
        version = tested.installed()
        if version is not None and installed_source(host) is not None:
            members = contract_of(host)
            found += [(host, m) for m in members if matches(version, m.versions)]
    return found


MEMBERS = installed_members()


@cache
def installed_problems(host):
    """What the installed host lacks of its contract."""
    source = installed_source(host)
    assert source is not None
    return check_contract(contract_of(host), source, TESTED[host].installed())


class Renamed(HostFiles):
    """A host's files with one word replaced."""

    def __init__(self, path, word):
        super().__init__(path)
        self._word = re.compile(rf"\b{re.escape(word)}\b".encode())

    def _read(self, file):
        content = super()._read(file)
        return None if content is None else self._word.sub(b"renamed_by_the_test", content)


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


@pytest.mark.parametrize("host", sorted({host for host, _ in MEMBERS}))
def test_the_installed_host_holds_its_contract(host):
    assert not [str(problem) for problem in installed_problems(host) if problem.readable]


@pytest.mark.parametrize(
    ("host", "member"), MEMBERS, ids=[f"{member.module}:{member.name}" for _, member in MEMBERS]
)
def test_a_member_that_is_renamed_is_missing(host, member):
    """Replace the member's name, if it has one; then each of its parameters."""
    for problem in installed_problems(host):
        if problem.member == member:
            assert not problem.readable
            pytest.skip(f"the source does not tell: {problem.instead}")
    source = installed_source(host)
    words = [member.name.rpartition(".")[-1]] if member.name else []
    for word in [*words, *member.parameters]:
        assert check_contract([member], Renamed(source, word)), f"without {word}"
