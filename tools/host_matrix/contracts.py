"""Check that an environment's host has every member that the plugin uses.

``python -m tools.host_matrix.contracts HOST``, run by the environment's interpreter.
"""

from __future__ import annotations

import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path

from deft_backend.hosts.common.contract import Member, check_contract, matches
from deft_backend.hosts.windows import TESTED
from tools.host_matrix.environment import ROOT, python_of


def run_contract(host: str, environment: Path) -> int:
    """Check the host of another environment; its lines go to the terminal. See :func:`check`."""
    command = [str(python_of(environment)), "-m", "tools.host_matrix.contracts", host]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def contract_of(host: str) -> tuple[Member, ...]:
    """The members that we use of a host; importing the table does not import the host."""
    table: tuple[Member, ...] = import_module(f"deft_backend.hosts.{host}.contract").CONTRACT
    return table


def check(host: str) -> int:
    """Check the version of a host that this process imports, and print what it lacks.

    Returns 1 if a version in the window lacks a member, 2 if no version is installed, else 0.
    docs/host-versions.md explains what to do about a missing member.
    """
    tested, begun = TESTED[host], time.perf_counter()
    version = tested.installed()
    if version is None:
        print(f"Error: {sys.executable} has no {tested.name}", file=sys.stderr)
        return 2
    contract = contract_of(host)
    problems = check_contract(contract, version)
    members = sum(matches(version, member.versions) for member in contract)
    lacking = {problem.member for problem in problems if problem.proven}
    unknown = {problem.member for problem in problems} - lacking
    line = f"{'✗' if lacking else '✓'} {tested.name} {version}: "
    line += f"{members - len(lacking) - len(unknown)} of {members} members hold"
    line += f", {len(lacking)} missing" if lacking else ""
    line += f", {len(unknown)} cannot be checked here" if unknown else ""
    line += "" if tested.holds(version) else f"; outside the window {tested}"
    print(f"{line} ({time.perf_counter() - begun:.0f} s)")
    for problem in problems:
        print(f"    {'missing' if problem.proven else 'not checked'} {problem}")
    return int(bool(lacking) and tested.holds(version))


if __name__ == "__main__":
    sys.exit(check(sys.argv[1]))
