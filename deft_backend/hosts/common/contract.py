"""Check by imports that a host has every member that its table, ``contract.py``, lists."""

from __future__ import annotations

import dis
import inspect
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any

from deft_backend.settings.config import Settings, SettingsError
from deft_backend.settings.version import installed_version


@dataclass(frozen=True)
class Member:
    module: str  # for example ``"sglang.srt.model_executor.forward_batch_info"``
    # Dotted name inside the module, for example ``"ForwardBatch.init_new"``; empty for the module.
    name: str = ""
    # Parameters that we pass by name, or that our override takes. For a class, the parameters of
    # its constructor.
    parameters: tuple[str, ...] = ()
    # Versions that have the member, for example ``">=0.5.20,<0.5.23"``; empty for the whole window.
    versions: str = ""
    use: str = ""  # what we do with it, where its name does not tell

    def __str__(self) -> str:
        return f"{self.module}: {self.name}" if self.name else self.module


def members_of(table: str) -> tuple[Member, ...]:
    """Read a table of members.

    A line without indentation is a module, or a comment behind ``#``. Lines indented by four spaces
    are its members: a name with parameters; behind bars, the versions if only some have it, and the
    use. Braces hold several names. A line indented by more continues the one before.

    >>> members_of("host.kinds\\n    Batch.{ids rows} | >=1.2 | read")[1].name
    'Batch.rows'
    """
    found, module = [], ""
    for line in re.sub(r"\n {8,}", " ", table).splitlines():
        if not line.startswith(" "):
            module = line
            continue
        name, *rest = (part.strip() for part in line.split("|"))
        versions = rest.pop(0) if rest and rest[0].startswith((">", "<")) else ""
        owner, _, several = name.rstrip("}").partition("{")
        for each in several.split() or [""]:
            dotted, _, given = (owner + each).rstrip(")").partition("(")
            parameters = tuple(given.replace(",", " ").split())
            found.append(Member(module, dotted, parameters, versions, *rest))
    return tuple(found)


@dataclass(frozen=True)
class Problem:
    member: Member
    instead: str  # what the host has instead
    # False if this machine cannot tell: a module that needs a GPU does not import, for example.
    # Only a proven problem keeps tree attention off.
    proven: bool = True

    def __str__(self) -> str:
        use = f" (our use: {self.member.use})" if self.member.use else ""
        return f"{self.member}: {self.instead}{use}"


def check_contract(contract: Iterable[Member], version: str) -> list[Problem]:
    wanted = (member for member in contract if matches(version, member.versions))
    return [problem for member in wanted for problem in _problems(member)]


def first_missing(contract: Iterable[Member], version: str | None) -> str | None:
    """The first member that the host provably lacks, with its number of others; or None."""
    if version is None:
        return None
    lacking = [problem for problem in check_contract(contract, version) if problem.proven]
    if not lacking:
        return None
    more = f" and {len(lacking) - 1} more" if lacking[1:] else ""
    return f"{lacking[0]}{more}"


def _problems(member: Member) -> Iterator[Problem]:
    try:
        found: Any = import_module(member.module)
    except Exception as error:  # a host's modules run any code
        lacking = error.name if isinstance(error, ModuleNotFoundError) else None
        absent = lacking is not None and f"{member.module}.".startswith(f"{lacking}.")
        yield Problem(member, "no such module" if absent else f"import fails ({error!r})", absent)
        return
    parts = member.name.split(".") if member.name else []
    for depth, part in enumerate(parts):
        found = _member(found, part)
        if found is _ABSENT:
            yield Problem(member, f"{'.'.join(parts[:depth]) or member.module} has no {part!r}")
            return
    if not member.parameters:
        return
    try:
        taken = inspect.signature(found).parameters
    except (TypeError, ValueError) as error:
        yield Problem(member, f"its parameters are unknown ({error})", proven=False)
        return
    takes_any = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values())
    for parameter in member.parameters:
        if parameter not in taken:
            instead = f"no parameter {parameter!r}; it takes ({', '.join(taken)})"
            yield Problem(member, instead, proven=not takes_any)


_ABSENT, _OF_INSTANCES = object(), object()
"""No such member; a field that only instances have, of which the class tells no more than the name.
"""


def _member(owner: Any, name: str) -> Any:
    """What a module or class holds under a name, `_OF_INSTANCES` or `_ABSENT`."""
    try:
        return getattr(owner, name)
    except Exception:  # modules and descriptors compute some values
        return _OF_INSTANCES if name in _names(owner) else _ABSENT


def _names(owner: Any) -> set[str]:
    names = set(dir(owner))
    for base in inspect.getmro(owner) if isinstance(owner, type) else ():
        names.update(inspect.get_annotations(base))
        for member in vars(base).values():
            function = getattr(member, "__func__", member)  # of class and static methods
            if isinstance(function, FunctionType):
                names.update(_assigned(getattr(inspect.unwrap(function), "__code__", None)))
    return names


def _assigned(code: CodeType | None) -> Iterator[str]:
    """Attributes that a function, or a function inside it, assigns: mostly those of ``self``."""
    if code is None:
        return
    for instruction in dis.get_instructions(code):
        if instruction.opname == "STORE_ATTR":
            yield instruction.argval
    for constant in code.co_consts:
        yield from _assigned(constant if isinstance(constant, CodeType) else None)


# Version numbers


def version_key(text: str) -> tuple[int, int, int]:
    """The first three numbers of a version, for comparison.

    Pre-releases, post-releases and local builds count as the release that they belong to. Hosts cut
    a branch before a pre-release, so its source is that of the release.

    >>> version_key("0.5.17.post1+cu130") < version_key("0.5.18rc0")
    True
    >>> version_key("0.33") == version_key("0.33.0")
    True

    Raises ValueError if the text does not begin with a number.
    """
    begin = re.match(r"\s*v?(\d+)(?:\.(\d+))?(?:\.(\d+))?", text)
    if begin is None:
        raise ValueError(f"{text!r} is not a version; expected for example 0.5.23")
    first, second, third = (int(number or 0) for number in begin.groups())
    return first, second, third


def matches(version: str, specifier: str) -> bool:
    """Whether a version satisfies clauses of ``>=`` and ``<``; none admits all versions.

    >>> matches("0.5.20", ">=0.5.18,<0.5.23"), matches("0.5.23", ">=0.5.18,<0.5.23")
    (True, False)

    Raises ValueError if either is malformed.
    """
    for clause in filter(None, map(str.strip, specifier.split(","))):
        if not clause.startswith((">=", "<")) or clause.startswith("<="):
            raise ValueError(f"{clause!r} is not a version clause; expected for example >=0.5.18")
        below = version_key(version) < version_key(clause.lstrip("<>="))
        if below != clause.startswith("<"):
            return False
    return True


# The versions of a host that get tree attention


@dataclass(frozen=True)
class TestedVersions:
    """The window of one host: every version from `lowest` to below `beyond`."""

    name: str  # the host's own
    distributions: tuple[str, ...]  # names that it may be installed under; the first is its own
    lowest: str
    beyond: str
    # Versions of which records show no wrong token of MLA models, with drafts and without.
    mla: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f">={self.lowest}, <{self.beyond}"

    @property
    def newest(self) -> str:
        """The last version of the window, or the last series of versions.

        >>> TestedVersions("Some host", ("some-host",), "0.5.17", "0.5.24").newest
        '0.5.23'
        """
        *leading, last = (int(number) for number in self.beyond.split("."))
        if not last:
            raise ValueError(f"the window ends before {self.beyond}; expected no 0 at its end")
        return ".".join(str(number) for number in (*leading, last - 1))

    def newer(self, version: str) -> str | None:
        return self.newest if version_key(version) < version_key(self.newest) else None

    def installed(self) -> str | None:
        return next(filter(None, map(installed_version, self.distributions)), None)

    def holds(self, version: str) -> bool:
        return version_key(self.lowest) <= version_key(version) < version_key(self.beyond)

    def refuse(self) -> str | None:
        """Why this environment's version gets no tree attention, in one line, or None."""
        version = self.installed()
        if version is None or self.holds(version) or tries_others():
            return None
        return (
            f"tree attention was tested with {self.name} {self} and this is {version} "
            "(DEFT_UNTESTED_HOST=1 tries it)"
        )

    def leaves_mla(self, settings: Settings, device: str = "cuda") -> str | None:
        """Why MLA models decode on the host's own backend, in one line, or None."""
        if settings.mla is not None:
            return None if settings.mla else "DEFT_MLA=0 leaves MLA models to the host's backend"
        version = self.installed()
        if device == "cuda" and version and any(matches(version, each) for each in self.mla):
            return None
        host = f"{self.name} {version or '(not installed)'}"
        return (
            f"no record shows MLA models with tree attention on {device} and {host}; DEFT_MLA=1 "
            "tries it, which saves time behind long shared prefixes alone"
        )


def tries_others() -> bool:
    """Whether ``DEFT_UNTESTED_HOST`` is set to yes; an invalid value is no: others report it."""
    name = "DEFT_UNTESTED_HOST"
    try:
        return Settings.from_env({name: os.environ.get(name, "")}).untested_host
    except SettingsError:
        return False
