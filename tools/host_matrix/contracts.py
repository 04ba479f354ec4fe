"""Check that versions of a host have every member that the plugin uses, by importing their wheels.

``python -m tools.host_matrix.contracts HOST`` checks the version that its interpreter imports.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from deft_backend.hosts.common.contract import Member, check_contract, matches
from deft_backend.hosts.windows import TESTED
from tools.host_matrix.environment import ROOT
from tools.host_matrix.wheels import WheelError, download_wheel, released_versions, wheel_version


def contracts(
    host: str,
    versions: Sequence[str] = (),
    wheel: Path | None = None,
    python: Path = Path(sys.executable),
) -> int:
    """Check a host's versions for every module, class, method and field that the plugin uses.

    Each version's wheel is unpacked into a temporary folder, before the packages of an environment
    that has the host's requirements. Without `versions`, the function checks the window of
    supported versions and the newest release. docs/host-versions.md explains what to do about a
    missing member.

    - `wheel`: Check this file; download none.
    - `python`: The environment's interpreter.

    Returns 1 if a version in the window lacks a member, else 0. Raises WheelError if a wheel cannot
    be downloaded or unpacked.
    """
    if wheel is not None and versions:
        raise WheelError("--wheel and --version exclude each other: the wheel's name has a version")
    tested = TESTED[host]
    if wheel is not None:
        if not wheel.is_file():
            raise WheelError(f"{wheel} is no file; expected a wheel (.whl)")
        distribution, _ = wheel_version(wheel)
        if distribution not in tested.distributions:
            raise WheelError(f"{wheel.name} is a wheel of {distribution}; expected one of {host}")
        return _check_wheel(host, wheel, python)
    window = f">={tested.lowest},<{tested.beyond}"
    codes = []
    for version in versions or released_versions(tested.distributions[0], window):
        with tempfile.TemporaryDirectory(prefix="deft-contracts-") as folder:
            path = download_wheel(tested.distributions[0], version, Path(folder))
            codes.append(_check_wheel(host, path, python))
    return max(codes, default=0)


def _check_wheel(host: str, wheel: Path, python: Path) -> int:
    with tempfile.TemporaryDirectory(prefix="deft-contracts-") as folder:
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
        except (OSError, zipfile.BadZipFile) as error:
            raise WheelError(f"{wheel} cannot be read as a wheel: {error}") from None
        path = os.pathsep.join([folder, str(ROOT), str(ROOT / "patches")])
        command = [str(python), "-m", "tools.host_matrix.contracts", host]
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            command, cwd=ROOT, env=environment, text=True, capture_output=True, check=False
        )
    print(done.stdout, end="", flush=True)
    if done.returncode not in (0, 1) or not done.stdout:
        raise WheelError(f"{wheel.name} cannot be checked with {python}:\n{done.stderr.strip()}")
    return done.returncode


def contract_of(host: str) -> tuple[Member, ...]:
    """The members that we use of a host; importing the table does not import the host."""
    table: tuple[Member, ...] = import_module(f"deft_backend.hosts.{host}.contract").CONTRACT
    return table


def check(host: str) -> int:
    """Check the version of a host that this process imports, and print it; 1 if it lacks a member.

    A version outside the window always returns 0. Raises WheelError if no version is installed.
    """
    tested, begun = TESTED[host], time.perf_counter()
    version = tested.installed()
    if version is None:
        raise WheelError(f"{sys.executable} has no {tested.name}")
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
