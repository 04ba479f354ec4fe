"""Check that a host's source has every member that we use, without importing the host.

Each host's folder holds its table: ``CONTRACT`` in ``contract.py``. :func:`check_contract` reads
only the files that define its members, so servers can run it at start.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from deft_backend.hosts.contract.names import Definition, HostNames
from deft_backend.hosts.contract.source import HostFiles
from deft_backend.hosts.contract.version_numbers import matches


@dataclass(frozen=True)
class Member:
    """One member of a host that we read, call, wrap or override."""

    module: str  # for example ``"sglang.srt.model_executor.forward_batch_info"``
    # Dotted name inside the module, for example ``"ForwardBatch.init_new"``; empty for the module.
    name: str = ""
    # Parameters that we pass by name, or that our override takes. For a class, the parameters of
    # its constructor.
    parameters: tuple[str, ...] = ()
    # Versions that have the member, for example ``">=0.5.20,<0.5.23"``; empty for the whole window.
    versions: str = ""
    use: str = ""  # what we do with it: "read", "called", "wrapped", "overridden", and for what

    def __str__(self) -> str:
        return f"{self.module}: {self.name}" if self.name else self.module


def every(module: str, owner: str, names: str, use: str, versions: str = "") -> tuple[Member, ...]:
    """Members of one class, or of the module if `owner` is empty, without parameters."""
    start = f"{owner}." if owner else ""
    return tuple(Member(module, start + name, (), versions, use) for name in names.split())


@dataclass(frozen=True)
class Problem:
    """A member that the host lacks, or defines differently from how we use it."""

    member: Member
    instead: str  # what the source has instead
    # False if the source does not show the member: its module is compiled, for example. Only a
    # readable problem proves that the member is missing.
    readable: bool = True

    def __str__(self) -> str:
        use = f" (our use: {self.member.use})" if self.member.use else ""
        return f"{self.member}: {self.instead}{use}"


def check_contract(
    contract: Iterable[Member], source: Path | HostFiles, version: str | None = None
) -> list[Problem]:
    """The members of a contract that a host's source lacks, in the contract's order.

    `source` is the folder that holds the host's top-level package. Without a `version`, the check
    includes members that only some versions have. Raises ValueError if there is no such folder, or
    a specifier or the version is malformed.
    """
    wanted = [m for m in contract if version is None or matches(version, m.versions)]
    packages = {member.module.split(".")[0] for member in wanted}
    files = source if isinstance(source, HostFiles) else HostFiles(source)
    names = HostNames(files, packages)
    return [problem for member in wanted for problem in _problems(member, names)]


def installed_source(package: str) -> Path | None:
    """The folder that holds an installed top-level package, found without importing it; or None."""
    try:
        spec = importlib.util.find_spec(package)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))).parent


def _problems(member: Member, names: HostNames) -> list[Problem]:
    """The problems of one member: the first one only, except for parameters."""
    module = names.module(member.module)
    if not module:
        package = names.module(member.module.split(".")[0])
        return [Problem(member, f"no such {'module' if package else 'package'}")]
    definitions, reached = module, member.module
    for part in filter(None, member.name.split(".")):
        owner = definitions
        definitions = names.attribute(owner, part)
        if not definitions:
            return [Problem(member, _absent(names, owner, reached, part))]
        if all(definition.kind == "unreadable" for definition in definitions):
            return [Problem(member, f"cannot be read: {definitions[0].reason}", readable=False)]
        reached = f"{reached}.{part}"
    found = [_absent_parameter(names, definitions, parameter) for parameter in member.parameters]
    return [Problem(member, *instead) for instead in found if instead is not None]


def _absent(names: HostNames, owner: list[Definition], reached: str, part: str) -> str:
    kind = next((definition.kind for definition in owner if definition.kind != "unreadable"), "")
    holder = reached.rsplit(".", 1)[-1] if kind != "module" else reached
    if kind not in ("module", "class"):
        return f"{holder} is a {kind}, so the source does not tell its attribute {part!r}"
    near = get_close_matches(part, sorted(names.known(owner)), n=2, cutoff=0.7)
    instead = f"; nearest: {', '.join(near)}" if near else ""
    return f"{kind} {holder} has no {part!r}{instead}"


def _absent_parameter(
    names: HostNames, definitions: list[Definition], parameter: str
) -> tuple[str, bool] | None:
    """A :class:`Problem`'s `instead` and `readable` for a parameter; None if a definition has it.

    A host may define a name more than once, by version or device. One definition with the parameter
    is enough.
    """
    signatures = [names.signature(definition) for definition in definitions]
    known = [signature for signature in signatures if signature is not None]
    if any(parameter in signature.names for signature in known):
        return None
    if len(known) < len(signatures):
        return "cannot be read: its parameters do not stand in the source", False
    if any(signature.takes_any for signature in known):
        return f"cannot be read: {parameter!r} may be one of its keyword arguments **", False
    taken = ", ".join(dict.fromkeys(name for signature in known for name in signature.names))
    return f"no parameter {parameter!r}; it takes ({taken})", True
